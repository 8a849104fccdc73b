"""Loads exported models as a user would in a new process, and reports their weights."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from checkpoint_weights import hash_weights
from common import write_json
from transformers import AutoModelForCausalLM


def main() -> None:
    """Writes one record for each folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    records = []
    for folder in args.folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        files = sorted(path.name for path in Path(folder).glob("*.safetensors"))
        records.append({"weights": hash_weights(model.state_dict()), "tied": tied, "files": files})
    write_json(args.out, records)


if __name__ == "__main__":
    main()
