"""Streamed parameters: what waits, what is noticed, and that everything else is a plain parameter."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from megatrain_ds.model.parameters import StreamedParameter, adopt, raw_data, release, set_raw_data


class Owner:
    """Records what a parameter asks for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[int, int]]] = []
        self.device: torch.device | None = None

    def before_access(self, param: StreamedParameter) -> None:
        self.events.append(("wait", param.megatrain_key))

    def touched(self, param: StreamedParameter) -> None:
        self.events.append(("touched", param.megatrain_key))

    def compute_device(self) -> torch.device | None:
        return self.device

    def lent(self, param: StreamedParameter, copied: torch.Tensor) -> None:
        self.events.append(("lent", param.megatrain_key))

    def take(self) -> list[str]:
        taken, self.events = [event for event, _ in self.events], []
        return taken


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def param(owner) -> StreamedParameter:
    return adopt(nn.Parameter(torch.arange(6.0).reshape(2, 3)), owner, (4, 1))


METADATA = {
    "shape": lambda p: p.shape,
    "size": lambda p: p.size(0),
    "numel": lambda p: p.numel(),
    "torch.numel": lambda p: torch.numel(p),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "len": lambda p: len(p),
    "ndim": lambda p: p.ndim,
    "dim": lambda p: p.dim(),
    "stride": lambda p: p.stride(),
    "element_size": lambda p: p.element_size(),
    "nbytes": lambda p: p.nbytes,
    "requires_grad": lambda p: p.requires_grad,
    "requires_grad_": lambda p: p.requires_grad_(True),
    "is_leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad,
    "clear grad": lambda p: setattr(p, "grad", None),
    "version": lambda p: p._version,
    "is_floating_point": lambda p: p.is_floating_point(),
    "is_contiguous": lambda p: p.is_contiguous(),
    "hash": lambda p: {p: 1}[p],
    "register_hook": lambda p: p.register_hook(lambda grad: None),
    "isinstance": lambda p: isinstance(p, nn.Parameter),
}
READS = {
    "add": lambda p: p + 1,
    # Not through torch.nn.functional, where stock ZeRO-3 puts a function of its own for the rest of the process.
    "linear": lambda p: torch._C._nn.linear(torch.ones(1, 3), p),
    "item": lambda p: p[0, 0].item(),
    "equal": lambda p: torch.equal(torch.zeros(2, 3), p),
    "in a list": lambda p: torch.cat([p.new_zeros(1, 3), p]),
    "in a dict": lambda p: torch.add(input=torch.zeros(2, 3), other=p),
    "clone": lambda p: p.clone(),
    "view with a graph": lambda p: p.view(-1),
    "to another dtype": lambda p: p.to(torch.bfloat16),
    "data_ptr": lambda p: p.data_ptr(),
    "repr": lambda p: repr(p),
    "format": lambda p: f"{p}",
}


@torch.no_grad()
def write_in_place(p):
    p.add_(1)


@torch.no_grad()
def write_through_index(p):
    p[0] = 9.0


@torch.no_grad()
def write_by_init(p):
    nn.init.ones_(p)


WRITES = {
    "in place": write_in_place,
    "index": write_through_index,
    "init": write_by_init,
    "data in place": lambda p: p.data.mul_(2),
    "detached alias": lambda p: p.detach().zero_(),
    "numpy": lambda p: p.detach().numpy().fill(1.0),
    "list of aliases": lambda p: p.detach().unbind()[0].zero_(),
    "data assigned": lambda p: setattr(p, "data", torch.zeros(2, 3)),
    "out argument": lambda p: torch.no_grad()(torch.add)(torch.ones(2, 3), 1, out=p),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_waits_for_nothing(name, owner, param):
    METADATA[name](param)
    assert owner.take() == []


@pytest.mark.parametrize("name", READS)
def test_reads_wait_first_and_count_as_no_write(name, owner, param):
    READS[name](param)
    taken = owner.take()
    assert taken[0] == "wait"
    assert "touched" not in taken


@pytest.mark.parametrize("name", WRITES)
def test_writes_and_aliases_are_noticed_after_a_wait(name, owner, param):
    WRITES[name](param)
    taken = owner.take()
    assert taken[0] == "wait"
    assert "touched" in taken
    assert not torch.equal(raw_data(param), torch.arange(6.0).reshape(2, 3))


def test_the_owner_learns_which_parameter(owner, param):
    other = adopt(nn.Parameter(torch.ones(2, 3)), owner, (7, 0))
    torch.add(param, other)
    assert owner.events == [("wait", (4, 1)), ("wait", (7, 0))]


def test_the_wait_comes_before_the_values_are_read(param):
    class Late(Owner):
        def before_access(self, param: StreamedParameter) -> None:
            raw_data(param).fill_(8.0)

    adopt(param, Late(), (0, 0))
    assert (param + 1).eq(9.0).all()


def test_assigned_data_is_written_into_the_arena(owner, param):
    memory = raw_data(param)
    param.data = torch.full((2, 3), 5.0)
    assert raw_data(param).data_ptr() == memory.data_ptr()
    assert memory.eq(5.0).all()
    param.data = torch.full((2, 3), 2.0, dtype=torch.float64)
    assert raw_data(param).dtype == torch.float32
    assert memory.eq(2.0).all()


def test_moving_or_casting_the_module_keeps_the_memory(param):
    module = nn.Linear(3, 2, bias=False)
    module.weight = param
    memory = raw_data(param).data_ptr()
    module.to(torch.bfloat16)
    assert module.weight is param
    assert raw_data(param).data_ptr() == memory


def test_data_of_another_shape_is_refused(param):
    with pytest.raises(ValueError, match=r"shape \(3, 3\) assigned where \(2, 3\) streams.*resize the model before"):
        param.data = torch.zeros(3, 3)


def test_results_are_plain_tensors(param):
    assert type(param * 2) is torch.Tensor
    assert type(param.detach()) is torch.Tensor
    assert type(param.data) is torch.Tensor


def test_gradients_reach_the_parameter(param):
    (param * 3).sum().backward()
    assert param.grad.eq(3.0).all()
    assert type(param.grad) is torch.Tensor


def test_adoption_keeps_identity_and_release_undoes_it(owner):
    plain = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([plain])
    adopted = adopt(plain, owner, (0, 0))
    assert adopted is plain is optimizer.param_groups[0]["params"][0]
    release(adopted)
    release(adopted)
    assert type(plain) is nn.Parameter
    assert not hasattr(plain, "megatrain_owner")
    plain.data.add_(1)
    assert owner.take() == []


def test_copies_are_plain_parameters_with_their_own_memory(owner, param):
    module = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)])
    module[0].weight = module[1].weight = param
    copied = copy.deepcopy(module)
    assert type(copied[0].weight) is nn.Parameter
    assert copied[0].weight is copied[1].weight
    assert torch.equal(copied[0].weight.data, raw_data(param))
    copied[0].weight.data.zero_()
    assert raw_data(param).any()


def test_pickled_and_saved_as_plain_parameters(param):
    loaded = pickle.loads(pickle.dumps(param))
    file = io.BytesIO()
    torch.save({"weight": param}, file)
    file.seek(0)
    for copied in (loaded, torch.load(file, weights_only=True)["weight"]):
        assert type(copied) is nn.Parameter
        assert torch.equal(copied.data, raw_data(param))


def test_state_dict_holds_plain_tensors(param):
    module = nn.Linear(3, 2, bias=False)
    module.weight = param
    assert {name: type(value) for name, value in module.state_dict().items()} == {"weight": torch.Tensor}


def test_load_state_dict_is_noticed_and_keeps_the_memory(owner, param):
    module = nn.Linear(3, 2, bias=False)
    module.weight = param
    memory = raw_data(param).data_ptr()
    module.load_state_dict({"weight": torch.full((2, 3), 7.0)})
    assert "touched" in owner.take()
    assert (raw_data(param).data_ptr(), raw_data(param)[0, 0].item()) == (memory, 7.0)


def test_raw_access_goes_past_the_owner(owner, param):
    memory = torch.zeros(2, 3)
    set_raw_data(param, memory)
    assert raw_data(param).data_ptr() == memory.data_ptr()
    assert owner.take() == []


# "meta" stands for a compute device: shapes and devices are checked as on any other.
def test_meets_tensors_of_another_device_there(param) -> None:
    product = nn.functional.linear(torch.empty(2, 3, device="meta"), param)
    assert product.device.type == "meta"
    assert product.requires_grad
    assert param[torch.zeros(1, dtype=torch.long, device="meta")].device.type == "meta"
    param.data.copy_(torch.ones(2, 3))
    assert param.device.type == "cpu"


@pytest.mark.parametrize(
    "operation",
    [lambda p: p.T, lambda p: p[0], lambda p: p @ p.T, lambda p: p.pow(2).mean(), lambda p: p.detach()],
    ids=["T", "row", "matmul", "mean", "detach"],
)
@pytest.mark.parametrize("grad", [True, False])
def test_computes_on_the_device_of_the_forward_under_way(owner, param, operation, grad) -> None:
    owner.device = torch.device("meta")
    with torch.set_grad_enabled(grad):
        assert operation(param).device.type == "meta"
    owner.device = None
    assert operation(param).device.type == "cpu"


def test_writes_in_a_forward_reach_the_parameter(owner, param) -> None:
    owner.device = torch.device("meta")
    with torch.no_grad():
        param.data.fill_(1.0)
        param[0] = 2.0
        param += 1.0
        param.mul_(2.0)
        torch.add(param, torch.ones(2, 3), out=param)
    assert raw_data(param).tolist() == [[7.0] * 3, [5.0] * 3]
    assert "touched" in owner.take()
