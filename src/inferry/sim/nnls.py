"""Non-negative least squares for a dozen unknowns and a few hundred rows.

The active-set method of Lawson and Hanson on the normal equations. Columns are scaled to one length first, because the
costs of a step and of a pair of tokens are six orders of magnitude apart.
"""

from collections.abc import Sequence

_RIDGE = 1e-9
_TOLERANCE = 1e-10


def nnls(rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """x >= 0 with the least sum of weight * (row . x - value)². Equal columns share their value."""
    count = len(rows[0]) if rows else 0
    scales = [
        sum(weight * row[j] * row[j] for row, weight in zip(rows, weights, strict=True)) ** 0.5 or 1.0
        for j in range(count)
    ]
    gram = [[0.0] * count for _ in range(count)]
    target = [0.0] * count
    for row, value, weight in zip(rows, values, weights, strict=True):
        scaled = [x / scale for x, scale in zip(row, scales, strict=True)]
        for i, x in enumerate(scaled):
            if x:
                target[i] += weight * x * value
                for j in range(i, count):
                    gram[i][j] += weight * x * scaled[j]
    for i in range(count):
        for j in range(i):
            gram[i][j] = gram[j][i]
        gram[i][i] += _RIDGE
    return [x / scale for x, scale in zip(_active_set(gram, target), scales, strict=True)]


def _active_set(gram: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    count = len(target)
    x = [0.0] * count
    free: list[int] = []
    for _ in range(3 * count):
        slopes = [target[i] - sum(gram[i][j] * x[j] for j in free) for i in range(count)]
        bound = [i for i in range(count) if i not in free]
        best = max(bound, key=slopes.__getitem__, default=None)
        if best is None or slopes[best] <= _TOLERANCE * max(map(abs, target), default=1.0):
            break
        free.append(best)
        while free:
            solved = dict(
                zip(free, solve([[gram[i][j] for j in free] for i in free], [target[i] for i in free]), strict=True)
            )
            if all(value > 0 for value in solved.values()):
                x = [solved.get(i, 0.0) for i in range(count)]
                break
            # Move towards the solution until a value would turn negative; values at zero are bound again.
            step = min(x[i] / (x[i] - value) for i, value in solved.items() if value <= 0)
            for i, value in solved.items():
                x[i] += step * (value - x[i])
            worst = min((i for i, value in solved.items() if value <= 0), key=lambda i: x[i])
            x[worst] = 0.0
            free = [i for i in free if x[i] > 0]
    return x


def solve(matrix: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """A small linear system, by Gaussian elimination with pivots. Undetermined directions get zero."""
    size = len(values)
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-15:
            continue
        for i in range(column + 1, size):
            factor = rows[i][column] / rows[column][column]
            if factor:
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    x = [0.0] * size
    for i in reversed(range(size)):
        rest = rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))
        x[i] = rest / rows[i][i] if abs(rows[i][i]) >= 1e-15 else 0.0
    return x
