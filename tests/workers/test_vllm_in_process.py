"""The parts of in-process vLLM that need no vLLM: metering, arguments, imports of its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import inferry
from inferry.workers.in_process.vllm_inprocess import VllmEngine
from inferry.workers.in_process.vllm_metering import StepMeter
from inferry.workers.in_process.vllm_process import BOOTSTRAP


def test_new_tokens_pay_for_their_part_of_a_step_and_the_prompt_for_the_rest() -> None:
    meter = StepMeter()
    meter.step(prompt_tokens=600, prompts=1, new_tokens=2, kv_tokens=20, seconds=0.8)
    first, second, prompt = meter.charge_new(1, 10), meter.charge_new(1, 10), meter.charge_prompt(600)
    assert first == pytest.approx(second)
    assert prompt > 5 * first
    assert first + second + prompt == pytest.approx(0.8)
    assert (meter.steps, meter.step_tokens, meter.step_seconds, meter.busy_seconds) == (1, 602, 0.8, 0.8)


def test_a_new_token_pays_for_the_context_that_it_reads() -> None:
    meter = StepMeter()
    meter.step(0, 0, 2, 100_100, 1.0)
    short, long = meter.charge_new(1, 100), meter.charge_new(1, 100_000)
    assert long > 2 * short
    assert short + long == pytest.approx(1.0)


def test_a_prompt_that_took_several_steps_pays_for_all_of_them() -> None:
    meter = StepMeter()
    meter.step(100, 1, 0, 0, 1.0)
    meter.step(20, 1, 0, 0, 0.5)
    assert meter.charge_prompt(120) == pytest.approx(1.5)


def test_prompts_in_one_step_pay_by_their_length() -> None:
    meter = StepMeter()
    meter.step(40, 2, 0, 0, 1.0)
    assert meter.charge_prompt(10) == pytest.approx(0.25)
    assert meter.charge_prompt(30) == pytest.approx(0.75)


def test_unowned_cost_is_not_charged_to_the_next_request() -> None:
    meter = StepMeter()
    meter.step(40, 1, 4, 40, 1.0)
    meter.idle()
    meter.step(10, 1, 0, 0, 0.2)
    assert meter.charge_prompt(10) == pytest.approx(0.2)
    assert meter.charge_new(4, 10) == 0


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 64), st.floats(0, 2)), max_size=40),
    st.lists(st.tuples(st.booleans(), st.integers(0, 600)), max_size=40),
)
def test_never_more_is_charged_than_steps_took(
    steps: list[tuple[int, int, float]], charges: list[tuple[bool, int]]
) -> None:
    meter = StepMeter()
    for prompt, new, seconds in steps:
        meter.step(prompt, int(prompt > 0), new, 100 * new, seconds)
    charged = sum(
        (meter.charge_prompt(tokens) if prompt else meter.charge_new(tokens, 50) for prompt, tokens in charges), 0.0
    )
    assert charged <= sum(seconds for _, _, seconds in steps) + 1e-9


def test_arguments_of_vllms_own_win_over_ours() -> None:
    engine = VllmEngine(python=Path("python"), max_sequences=8, context_tokens=512, arguments={"max_num_seqs": 4})
    arguments = engine.engine_arguments(Path("model"))
    assert (arguments["model"], arguments["max_num_seqs"], arguments["max_model_len"]) == ("model", 4, 512)
    assert arguments["scheduling_policy"] == "priority"


def test_the_process_sees_inferry_and_nothing_installed_beside_it(tmp_path: Path) -> None:
    """With an interpreter that has msgspec alone, as vLLM's has of what Inferry needs."""
    msgspec_home = Path(sys.modules["msgspec"].__file__ or "").parents[1]
    registry = tmp_path / "shelf"
    registry.mkdir()
    (registry / "msgspec").symlink_to(msgspec_home / "msgspec")
    package = Path(inferry.__file__).parent
    # The real one ends by serving a socket; this ends where that begins, and says what was imported until then.
    script = f"import sys; sys.path.append({str(registry)!r})\n" + BOOTSTRAP.replace(
        "main(int(sys.argv[2]))",
        "print(sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))",
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(package), "0"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert ran.stdout.strip() == "['__main__', 'inferry', 'msgspec']"
