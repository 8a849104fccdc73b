"""Every model of configs/models is the published one, or a cut of it in depth alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from comparisons.models import build_model, build_skeleton

MODELS = Path(__file__).parents[2] / "configs" / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
# Query and output, key and value (8 of 40 heads), their biases, the three matrices of the MLP, two norms.
LAYER_14B = 2 * 5120 * 5120 + 2 * 1024 * 5120 + (5120 + 2 * 1024) + 3 * 5120 * 13_824 + 2 * 5120
# As the models' publishers state them; a cut lacks some of the 48 layers.
NUM_PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-14b-12l": 14_770_033_664 - 36 * LAYER_14B,
    "qwen2.5-14b-24l": 14_770_033_664 - 24 * LAYER_14B,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-7b": 7_615_616_512,
}
ROPE_THETA = {"llama-3-8b": 500_000.0, "tiny": 10_000.0}
SMALL = 1_000_000
# Fields of a configuration that follow from the number of layers.
DEPTH_FIELDS = {"num_hidden_layers", "layer_types", "max_window_layers"}


@pytest.mark.parametrize("name", NAMES)
def test_builds_on_the_meta_device_with_the_published_number_of_parameters(name: str) -> None:
    model = build_skeleton(MODELS / f"{name}.json")
    assert {param.device.type for param in model.parameters()} == {"meta"}
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    num_parameters = sum(param.numel() for param in model.parameters())
    if name == "tiny":
        assert num_parameters < SMALL, "the tiny model is for tests on a CPU"
    else:
        assert num_parameters == NUM_PARAMETERS[name], "add a new file's published count to NUM_PARAMETERS"


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_the_file_reaches_the_configuration(name: str) -> None:
    fields = json.loads((MODELS / f"{name}.json").read_text())
    config = build_skeleton(MODELS / f"{name}.json").config
    theta = fields.pop("rope_theta")
    assert {key: getattr(config, key) for key in fields} == fields
    # transformers 5 keeps it in `rope_parameters`, 4 as an attribute.
    found = getattr(config, "rope_parameters", None) or {"rope_theta": getattr(config, "rope_theta", None)}
    assert theta == found["rope_theta"] == ROPE_THETA.get(name, 1_000_000.0)


@pytest.mark.parametrize("layers", [12, 24])
def test_a_cut_is_the_whole_model_in_everything_but_its_depth(layers: int) -> None:
    whole, cut = (build_skeleton(MODELS / f"qwen2.5-14b{cut}.json").config for cut in ("", f"-{layers}l"))
    assert (whole.num_hidden_layers, cut.num_hidden_layers) == (48, layers)
    ours, theirs = cut.to_dict(), whole.to_dict()
    differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert differing <= DEPTH_FIELDS
    assert whole.layer_types[:layers] == cut.layer_types


def test_weights_depend_on_the_seed_alone() -> None:
    cpu = torch.device("cpu")
    first, again, other = (build_model(MODELS / "tiny.json", cpu, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert all(value.isfinite().all() for value in first.values())
