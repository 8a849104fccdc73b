"""Files of `write_archive` against `torch.load`: content, ties, dtypes, mapping, and that nothing is held."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from megatrain_ds.checkpoint.archive import StreamedTensor, write_archive

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def round_trip(path: Path, content: object, **options: object) -> dict:
    write_archive(path, content)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return torch.load(path, weights_only=True, **options)


def test_pieces_become_one_tensor(tmp_path: Path) -> None:
    parts = [torch.randn(3, 4), torch.randn(0), torch.randn(5).t(), torch.randn(4, 3).t()]
    streamed = StreamedTensor([lambda part=part: part for part in parts], [29], torch.float32)
    loaded = round_trip(tmp_path / "a.pt", {"x": [streamed], "y": 3})
    assert torch.equal(loaded["x"][0], torch.cat([part.reshape(-1) for part in parts]))
    assert loaded["y"] == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3, 4), (1, 70)], ids=str)
def test_dtypes_and_shapes_match_torch_save(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    loaded = round_trip(tmp_path / "a.pt", {"streamed": StreamedTensor.of(tensor), "plain": tensor})
    torch.save(tensor, tmp_path / "b.pt")
    expected = torch.load(tmp_path / "b.pt", weights_only=True)
    for value in loaded.values():
        assert (value.dtype, value.shape, value.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(value, expected)


def test_mapped_tensors_are_aligned(tmp_path: Path) -> None:
    content = OrderedDict((f"t{n}", torch.full((n,), float(n))) for n in range(1, 40))
    loaded = round_trip(tmp_path / "a.pt", content, mmap=True)
    assert all(torch.equal(loaded[name], value) for name, value in content.items())
    assert all(value.data_ptr() % 64 == 0 for value in loaded.values())


def test_a_single_element_with_a_stride(tmp_path: Path) -> None:
    column = torch.arange(300.0).view(1, 300)[:, 7]
    assert round_trip(tmp_path / "a.pt", StreamedTensor.of(column)).tolist() == [7.0]


def test_ties_stay_ties(tmp_path: Path) -> None:
    plain, streamed = torch.randn(4), StreamedTensor.of(torch.randn(4))
    parameter = torch.nn.Parameter(torch.randn(4))
    loaded = round_trip(tmp_path / "a.pt", [plain, plain, streamed, streamed, parameter, plain.view(2, 2)])
    assert loaded[0] is loaded[1]
    assert loaded[2] is loaded[3]
    assert isinstance(loaded[4], torch.nn.Parameter)
    assert loaded[5].untyped_storage().data_ptr() == loaded[0].untyped_storage().data_ptr()


def test_a_view_does_not_bring_its_storage(tmp_path: Path) -> None:
    arena = torch.randn(100_000)
    loaded = round_trip(tmp_path / "a.pt", {"row": arena[10:20], "column": arena.view(-1, 100)[:, 3]})
    assert torch.equal(loaded["row"], arena[10:20])
    assert torch.equal(loaded["column"], arena.view(-1, 100)[:, 3])
    assert (tmp_path / "a.pt").stat().st_size < 20_000


def test_a_record_can_exceed_a_chunk_and_is_read_late(tmp_path: Path) -> None:
    calls = []

    def piece(fill: int) -> torch.Tensor:
        calls.append(fill)
        return torch.full((5 << 20,), float(fill))

    streamed = StreamedTensor([lambda: piece(1), lambda: piece(2)], [10 << 20], torch.float32)
    assert calls == []
    loaded = round_trip(tmp_path / "a.pt", streamed, mmap=True)
    assert calls == [1, 2]
    assert loaded[0] == loaded[(5 << 20) - 1] == 1
    assert loaded[5 << 20] == loaded[-1] == 2


def test_a_piece_of_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"torch.float64.*torch.float32"):
        write_archive(tmp_path / "a.pt", StreamedTensor([lambda: torch.zeros(1).double()], [1], torch.float32))


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("old")
    with pytest.raises(FileExistsError):
        write_archive(tmp_path / "a.pt", {})
    assert (tmp_path / "a.pt").read_text() == "old"
