"""What the simulated gateway knows of prompts agrees with what the gateway learns from their bytes."""

from inferry.domain.lanes import Lane
from inferry.prediction.prefix_hits import PrefixHitModel
from inferry.sim.calls import Call, Run, Step
from inferry.sim.prompt_memory import BYTES_PER_TOKEN, PromptPrefixes
from inferry.sim.prompts import Piece


def a_call(*prompt: Piece, tenant: str = "t") -> Call:
    run = Run(run_id="r", tenant=tenant, lane=Lane.P0, at=0.0, steps=(Step("one", prompt, 10),))
    return Call("r/0", 1, run, 0, sum(piece[2] for piece in prompt), 0.0)


def shared(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    return len(set(a) & set(b))


def body(*prompt: Piece) -> bytes:
    return b"".join(b"%04x" % ((segment * 7919 + at) % 65536) for segment, start, n in prompt for at in range(start, n))


def test_prompts_that_begin_alike_share_the_names_of_what_they_share() -> None:
    for common in (100, 300, 1_500, 12_000, 40_000):
        prompts = (((1, 0, common), (2, 0, 2_000)), ((1, 0, common), (3, 0, 2_000)))
        names, memory = PromptPrefixes(), PrefixHitModel()
        simulated = [names(a_call(*prompt)) for prompt in prompts]
        real = [memory.match("t", "m", body(*prompt)).chain for prompt in prompts]
        assert [len(one) for one in simulated] == [len(one) for one in real]
        assert shared(*simulated) == shared(*real)
    assert BYTES_PER_TOKEN == 4


def test_names_are_those_of_one_tenant_and_the_same_for_the_same_runs() -> None:
    call, other = a_call((1, 0, 1_000)), a_call((1, 0, 1_000), tenant="u")
    names = PromptPrefixes()
    assert shared(names(call), names(other)) == 0
    assert names(call) == PromptPrefixes()(call) != ()


def test_a_prompt_shorter_than_a_slice_has_no_name() -> None:
    assert PromptPrefixes()(a_call((1, 0, 255))) == ()
