"""Which blocks stream, which parameters stay, and what is refused, on models small enough to list."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from megatrain_ds.errors import UnsupportedModelError
from megatrain_ds.model.discovery import find_units


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if inner is not None:
            self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def listed(model: nn.Module, names=None) -> dict[str, list[str]]:
    units = find_units(model, names)
    assert [unit.index for unit in units] == list(range(len(units)))
    every = [id(param) for unit in units for _, param in unit.parameters]
    assert sorted(every) == sorted(id(param) for param in model.parameters())  # each in exactly one unit
    return {unit.name: [name for name, _ in unit.parameters] for unit in units}


def test_a_list_of_blocks_streams_and_the_rest_is_one_root_unit():
    model = Model(embed=nn.Embedding(3, 2), layers=blocks(2), norm=nn.LayerNorm(2))
    assert listed(model) == {
        "layers.0": ["layers.0.linear.weight", "layers.0.linear.bias"],
        "layers.1": ["layers.1.linear.weight", "layers.1.linear.bias"],
        "root: embed.weight...": ["embed.weight", "norm.weight", "norm.bias"],
    }
    assert [unit.is_root for unit in find_units(model)] == [False, False, True]


def test_every_stack_streams_outermost_first():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = Model(encoder=Model(layers=blocks(2)), decoder=Model(layers=nn.ModuleList([Block(inner), Block()])))
    names = [unit.name for unit in find_units(model) if not unit.is_root]
    assert names == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]


def test_a_model_that_is_itself_a_sequential_of_blocks():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert listed(model) == {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_a_list_of_one_block_is_no_repetition(container):
    model = Model(layers=container(*([[Block()]] if container is nn.ModuleList else [Block()])))
    with pytest.warns(UserWarning, match="Model has no repeated blocks.*nothing streams"):
        (unit,) = find_units(model)
    assert unit.is_root


def test_a_block_listed_twice_is_one_unit():
    shared = Block()
    assert [u.name for u in find_units(Model(layers=nn.ModuleList([shared, shared])))] == ["layers.0"]


def test_no_split_classes_are_used_where_no_list_repeats():
    model = Model(first=Block(), second=Block())
    model._no_split_modules = ["Block"]
    assert list(listed(model)) == ["first", "second"]


def test_a_weight_inside_a_block_and_outside_stays_on_the_device():
    model = Model(layers=blocks(2), head=nn.Linear(2, 2, bias=False))
    model.layers[1].linear.weight = model.head.weight
    assert listed(model) == {
        "layers.0": ["layers.0.linear.weight", "layers.0.linear.bias"],
        "layers.1": ["layers.1.linear.bias"],
        "root: layers.1.linear.weight": ["layers.1.linear.weight"],
    }


def test_a_weight_twice_in_one_block_streams_with_both_holders():
    model = Model(layers=nn.ModuleList([Block(nn.Linear(2, 2)), Block()]))
    model.layers[0].inner.weight = model.layers[0].linear.weight
    unit = find_units(model)[0]
    assert [name for name, _ in unit.parameters] == [
        "layers.0.linear.weight",
        "layers.0.linear.bias",
        "layers.0.inner.bias",
    ]
    assert unit.holders[0] == [(model.layers[0].linear, "weight"), (model.layers[0].inner, "weight")]


def test_recurrent_weights_inside_a_block_stay_on_the_device():
    model = Model(layers=nn.ModuleList([Block(nn.GRU(2, 2)), Block()]))
    units = find_units(model)
    assert [unit.name for unit in units if not unit.is_root] == ["layers.0", "layers.1"]
    assert {name.split(".")[2] for unit in units if unit.is_root for name, _ in unit.parameters} == {"inner"}


def test_large_root_modules_get_their_own_units():
    model = Model(embed=nn.Embedding(1 << 10, 1 << 10, device="meta"), layers=blocks(2), norm=nn.LayerNorm(2))
    roots = [unit.name for unit in find_units(model) if unit.is_root]
    assert roots == ["root: norm.weight...", "root: embed.weight"]


def test_blocks_are_named_by_class_by_path_and_by_list():
    model = Model(first=Block(), stack=blocks(2), only=Block())
    assert [u.name for u in find_units(model, ["Block"]) if not u.is_root] == ["first", "stack.0", "stack.1", "only"]
    assert [u.name for u in find_units(model, ["only", "first"]) if not u.is_root] == ["only", "first"]
    assert [u.name for u in find_units(model, ["stack"]) if not u.is_root] == ["stack.0", "stack.1"]


def test_a_name_that_matches_nothing_is_refused_with_the_classes_there_are():
    with pytest.raises(UnsupportedModelError, match=r"'Layer', which is neither .* one of: Block, Linear, Model"):
        find_units(Model(layers=blocks(2)), ["Layer"])


def test_a_named_block_inside_another_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"matches 'first.linear' inside 'first'"):
        find_units(Model(first=Block()), ["Block", "Linear"])


def test_blocks_without_parameters_and_empty_models():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert listed(Model(layers=nn.Sequential(nn.ReLU(), nn.ReLU()))) == {}
