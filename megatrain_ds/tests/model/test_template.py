"""Binding: a block runs on given tensors without copies and has its own parameters back whatever happens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatrain_ds.model.discovery import find_units
from megatrain_ds.model.template import Template


def tied_unit():
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    block[1].weight = block[0].weight
    (unit,) = [unit for unit in find_units(nn.ModuleList([block]), ["0"]) if not unit.is_root]
    return block, unit


def test_every_holder_sees_the_given_tensor_and_nothing_is_copied():
    block, unit = tied_unit()
    own = dict(block.named_parameters())
    given = [torch.full((2, 2), 2.0), torch.tensor([1.0, 0.0])]
    with Template(unit).bound(given):
        assert block[0].weight is block[1].weight is given[0]
        assert block[0].bias is given[1]
        # (1, 1) x 2s = (4, 4), plus (1, 0) = (5, 4), x 2s = (18, 18)
        assert block(torch.ones(1, 2)).tolist() == [[18.0, 18.0]]
    assert all(param is own[name] for name, param in block.named_parameters())


def test_gradients_flow_to_the_given_tensors_and_not_to_the_parameters():
    block, unit = tied_unit()
    given = [torch.ones(2, 2, requires_grad=True), torch.zeros(2, requires_grad=True)]
    with Template(unit).bound(given):
        block(torch.ones(1, 2)).sum().backward()
    assert given[0].grad is not None
    assert all(param.grad is None for param in block.parameters())


def test_an_exception_leaves_the_parameters_in_place():
    block, unit = tied_unit()
    own = dict(block.named_parameters())
    with pytest.raises(RuntimeError, match="mat1"), Template(unit).bound([torch.ones(3, 3), torch.ones(3)]):
        block(torch.ones(1, 2))
    assert all(param is own[name] for name, param in block.named_parameters())


def test_bindings_nest():
    block, unit = tied_unit()
    template, outer, inner = Template(unit), [torch.ones(2, 2), torch.ones(2)], [torch.zeros(2, 2), torch.zeros(2)]
    own = block[0].weight
    with template.bound(outer):
        with template.bound(inner):
            assert block[0].weight is inner[0]
        assert block[0].weight is outer[0]
    assert block[0].weight is own
