"""All stages of a module, one after another in one process, against the whole module."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from ringstrategy.pipeline.calls import flatten_call
from ringstrategy.pipeline.programs import cut
from ringstrategy.pipeline.tracing import Traces
from tests.helpers.cut_models import (
    Arguments,
    Brancher,
    ChangesInput,
    Checkpoints,
    Contexts,
    Convolutions,
    Counts,
    InPlace,
    OwnParameters,
    Reentrant,
    Reused,
    Skips,
    SkipsAtRandom,
    Structures,
    Tied,
    Transformer,
    Views,
)
from tests.helpers.stages import check_stages


def _x(*shape: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, math.prod(shape), dtype=torch.float64).reshape(shape).sin()


def test_a_value_travels_with_every_cut_it_crosses() -> None:
    *_, programs = check_stages(Skips(), _x(3, 4), stages=(2, 4, 6))
    early = programs[0].sends[0]
    assert all(early in program.sends for program in programs[:-1])
    assert programs[5].inputs == (0,), "the last stage reads the input itself"
    assert all(program.inputs == () for program in programs[1:5])


def test_sequentials_are_flattened() -> None:
    module = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 2)
    )
    *_, programs = check_stages(module, _x(3, 4), stages=(2, 5))
    assert [program.modules for program in programs] == [("0",), ("1.0",), ("1.1.0",), ("1.1.1",), ("2",)]
    assert [program.parameters for program in programs][:3] == [
        ("0.weight", "0.bias"),
        (),
        ("1.1.0.weight", "1.1.0.bias"),
    ]


def test_structures_cross_cuts() -> None:
    arguments = ({"x": _x(2, 3, 4), "n": torch.arange(3)}, (_x(2, 3, 4), None))
    check_stages(Structures(), *arguments, stages=(1, 2, 3, 5))
    check_stages(Structures(), *arguments, False, stages=(3,))


def test_views_cross_cuts() -> None:
    check_stages(Views(), _x(3, 4))


def test_operations_in_place() -> None:
    check_stages(InPlace(), _x(3, 4), stages=(1, 2, 3, 5))


def test_inputs_that_are_changed_in_place() -> None:
    *_, programs = check_stages(ChangesInput(), _x(3, 4), _x(3, 4) + 0.5)
    assert [program.inputs for program in programs] == [(1, 0), (), (1,)]
    assert "input_0" in programs[0].sends
    assert "input_1" not in programs[0].sends


def test_tied_weights_are_used_by_two_stages_under_one_name() -> None:
    *_, programs = check_stages(Tied(), torch.tensor([[1, 2, 3], [0, 6, 1]]), stages=(2, 3, 4))
    assert [program.parameters for program in programs] == [
        ("embedding.weight",),
        ("body.0.weight", "body.0.bias"),
        (),
        ("embedding.weight",),
    ]


def test_modules_that_are_called_several_times() -> None:
    *_, programs = check_stages(Reused(), _x(3, 4), stages=(2, 3, 5))
    assert [program.modules for program in programs] == [("shared",), ("act",)] * 2 + [("shared",)]


def test_parameters_and_buffers_that_functions_use() -> None:
    module = OwnParameters()
    *_, programs = check_stages(module, _x(3, 4), stages=(1, 2))
    assert programs[0].parameters == ("scale", "one.weight", "one.bias")
    assert programs[0].buffers == ("steps", "offset")
    assert programs[1].parameters == ("two.weight", "two.bias", "scales.1", "scale")


@pytest.mark.parametrize("sign", [1, -1])
def test_control_flow_stays_whole(sign: int) -> None:
    module = Brancher().double()
    nn.init.eye_(module.first.weight)
    *_, programs = check_stages(module, sign * torch.ones(3, 4, dtype=torch.float64), stages=(2, 3))
    assert [program.modules for program in programs] == [("first",), ("branches",), ("last",)]


def test_random_numbers_and_attributes() -> None:
    module = nn.Sequential(*(SkipsAtRandom() for _ in range(8)), Counts(), nn.Dropout(0.5))
    *_, programs = check_stages(module, _x(3, 4), stages=(2, 5, 10))
    assert [program.modules for program in programs] == [(str(number),) for number in range(10)]


def test_functions_with_their_own_backward_and_contexts() -> None:
    check_stages(Contexts(), _x(3, 4))


def test_hooks_run() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)).double()
    calls: list[str] = []
    module[1].register_forward_hook(lambda *_: calls.append("forward"))
    module[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    module[2].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    check_stages(module, _x(3, 4), stages=(3,))
    assert calls == ["forward", "backward"] * 2


def test_arguments() -> None:
    check_stages(Arguments(), _x(3, 4), stages=(1, 2))
    check_stages(Arguments(), _x(3, 4), None, stages=(2,))
    check_stages(Arguments(), _x(3, 4), _x(3, 4) + 1, _x(2), _x(1), stages=(2,))
    with pytest.raises(AssertionError, match="too few rows"):
        check_stages(Arguments(), _x(1, 4), stages=(1,))


@pytest.mark.parametrize("training", [True, False])
def test_training_and_evaluation(training: bool) -> None:
    check_stages(Convolutions().train(training), _x(3, 2, 8, 8), stages=(1, 2, 3, 6))


def test_a_transformer() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    *_, programs = check_stages(Transformer(), tokens, tokens != 4, stages=(1, 2, 4))
    assert [program.inputs for program in programs] == [(0,), (1,), (1,), (1,)]
    assert all(not any("input" in name for name in program.sends) for program in programs)
    assert [program.buffers for program in programs] == [(), ("bias",), ("bias",), ("bias",)]


@pytest.mark.parametrize("training", [True, False])
def test_transformers_of_torch_are_cut_between_their_layers(training: bool) -> None:
    module = nn.Transformer(8, 2, 2, 2, 16, dropout=0.3 if training else 0.0, batch_first=True).train(training)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = torch.tensor([[0.0] * 4 + [-1e9], [0.0] * 5], dtype=torch.float64)
    arguments = (_x(2, 4, 8), _x(2, 5, 8) * 2, None, causal, None, None, padding)
    *_, programs = check_stages(module, *arguments, stages=(1, 2, 6))
    names = ["encoder.layers.0", "encoder.layers.1", "encoder.norm", "decoder.layers.0", "decoder.layers.1"]
    assert [program.modules for program in programs] == [(name,) for name in [*names, "decoder.norm"]]
    check_stages(module, _x(4, 8), _x(5, 8), None, causal > -1, stages=(2,))


class Packs(nn.Module):
    """Functions of torch that know nothing of traced values, and keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths, batch_first=True)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return torch.tanh(self.last(h).masked_fill(mask=h > 0, value=0.5))


def test_packed_sequences() -> None:
    check_stages(Packs(), _x(2, 3, 4), torch.tensor([3, 2]))


def test_activations_that_are_computed_again() -> None:
    check_stages(Checkpoints(), _x(3, 4))
    *_, programs = check_stages(nn.Sequential(nn.Linear(4, 4), Reentrant()), _x(3, 4), stages=(2,))
    assert programs[1].modules == ("1",)


def test_a_stage_may_be_empty_of_tensors_that_need_gradients() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).requires_grad_(False)
    module[2].requires_grad_(True)
    check_stages(module, _x(3, 4), stages=(3,))


def test_constants_are_the_same_at_each_run() -> None:
    module = OwnParameters().double()
    tensors, call = flatten_call((_x(3, 4),), {})
    (program,) = cut(Traces(module).get(call), [])
    first, second = (program((), tensors)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert module.steps == 2


def test_errors_name_the_operation() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    trace = Traces(module).get(flatten_call((torch.zeros(2, 4),), {})[1])
    first, second = cut(trace, [("1", 0)])
    with pytest.raises(RuntimeError) as caught:
        second(first((), [torch.zeros(2, 4)]), [None])
    assert caught.value.__notes__ == ["while '1' of the pipelined module ran"]
    with pytest.raises(ValueError, match=r"takes 1 values \(_0\), not 0"):
        second((), [None])


@pytest.mark.parametrize(
    ("anchors", "message"),
    [
        ([("3", 0)], "cannot be cut before call 1 of '3'"),
        ([("1", 1)], "cannot be cut before call 2 of '1'"),
        ([("2", 0), ("1", 0)], "cannot be cut before '1': nothing is left"),
        ([("1", 0), ("1", 0)], "cannot be cut before '1': nothing is left"),
        ([("0", 0)], "cannot be cut before '0': nothing is left"),
    ],
)
def test_cuts_that_do_not_fit(anchors: list[tuple[str, int]], message: str) -> None:
    trace = Traces(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())).get(flatten_call((torch.zeros(1),), {})[1])
    with pytest.raises(ValueError, match=message):
        cut(trace, anchors)


def test_values_are_freed_after_their_last_use() -> None:
    alive: list[int] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(reference() is not None for reference in references))
            result = x + 1
            references.append(weakref.ref(result))
            return result

    references: list[weakref.ref[Tensor]] = []
    module = nn.Sequential(*(Watch() for _ in range(5)))
    (program,) = cut(Traces(module).get(flatten_call((torch.zeros(1),), {})[1]), [])
    program((), [torch.zeros(1)])
    assert alive == [0, 1, 1, 1, 1]
