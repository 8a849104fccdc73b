"""Writes files that `torch.load` reads, without holding their tensors in one piece.

`torch.save` needs every tensor contiguous in memory; masters and moments lie unit by unit, so that it would need a copy
of the whole optimizer state. Here a `StreamedTensor` stands for a tensor and yields its elements when its record is
written. The file is PyTorch's zip format (an uncompressed zip: `data.pkl`, `byteorder`, `data/<key>`, `version`), with
records aligned for `torch.load(mmap=True)`. Knows nothing of checkpoints.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

_ROOT = "archive"
_FORMAT_VERSION = b"3\n"
_RECORD_ALIGNMENT_BYTES = 64
_CHUNK_BYTES = 16 << 20
# Of a zip's local header: the fixed part, the zip64 field that `force_zip64` adds, and the head of the padding field.
_LOCAL_HEADER_BYTES = 30
_ZIP64_FIELD_BYTES = 20
_PADDING_FIELD_ID = 0x4246
_PROTOCOL = 2


class StreamedTensor:
    """A tensor that is read only while it is written.

    Args:
        pieces: called one after the other when the record is written; each gives a tensor of `dtype` on any device,
            whose elements follow those of the piece before.
        shape: shape that the tensor has once loaded; its number of elements is that of all pieces together.
        dtype: dtype of every piece.
    """

    def __init__(self, pieces: Sequence[Callable[[], torch.Tensor]], shape: Sequence[int], dtype: torch.dtype) -> None:
        self.pieces, self.shape, self.dtype = pieces, tuple(shape), dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StreamedTensor:
        """Stand for a tensor that exists, leaving out whatever else its storage holds."""
        return cls([lambda: tensor], tensor.shape, tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What an empty tensor of the dtype reduces to says how the installed torch rebuilds one.
        rebuild, (storage, _, _, _, *rest) = torch.empty(0, dtype=self.dtype).__reduce_ex__(_PROTOCOL)
        stride = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return rebuild, (_Record(self, storage), 0, self.shape, stride, *rest)


class _Record:
    """The storage of a `StreamedTensor` as the pickler meets it."""

    def __init__(self, tensor: StreamedTensor, prototype: Any) -> None:
        self.tensor, self.prototype = tensor, prototype


class _Pickler(pickle.Pickler):
    """Pickles everything but storages, which it collects in the order of their keys."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self.storages: list[torch.UntypedStorage | StreamedTensor] = []
        self._keys: dict[int, str] = {}
        self._records: list[_Record] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Record):
            self._records.append(obj)
            return self._identify(obj.prototype, obj.tensor, id(obj), obj.tensor.num_bytes)
        if isinstance(obj, torch.storage.TypedStorage):
            untyped = obj._untyped_storage
            return self._identify(obj, untyped, untyped._cdata, untyped.nbytes())
        if isinstance(obj, torch.UntypedStorage):
            return self._identify(obj, obj, obj._cdata, obj.nbytes())
        return None

    def reducer_override(self, obj: Any) -> Any:
        # A view drags its whole storage into the file: of an arena, that would be the model.
        if type(obj) is torch.Tensor and _is_partial_view(obj):
            return StreamedTensor.of(obj).__reduce_ex__(_PROTOCOL)
        return NotImplemented

    def _identify(self, storage: Any, source: Any, identity: int, num_bytes: int) -> tuple[Any, ...]:
        if identity not in self._keys:
            self._keys[identity] = str(len(self.storages))
            self.storages.append(source)
        if isinstance(storage, torch.storage.TypedStorage):
            kind, itemsize = getattr(torch, storage._pickle_storage_type()), storage._element_size()
        else:
            kind, itemsize = torch.UntypedStorage, 1
        return "storage", kind, self._keys[identity], "cpu", num_bytes // itemsize


def write_archive(path: Path, content: object) -> None:
    """Write `content` for `torch.load`, and have the system put it on the disk before returning.

    Args:
        path: the file, which must not exist.
        content: what `torch.save` takes, with `StreamedTensor` wherever a tensor may stand. Tensors of any device are
            written as host tensors.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    with path.open("xb") as stream:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            _write_record(archive, stream, "data.pkl", [buffer.getbuffer()])
            _write_record(archive, stream, "byteorder", [sys.byteorder.encode()])
            for key, storage in enumerate(pickler.storages):
                _write_record(archive, stream, f"data/{key}", _chunks(storage))
            _write_record(archive, stream, "version", [_FORMAT_VERSION])
        stream.flush()
        os.fsync(stream.fileno())


def _is_partial_view(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta" or tensor.requires_grad:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _write_record(archive: zipfile.ZipFile, stream: Any, name: str, chunks: Iterable[Any]) -> None:
    entry = zipfile.ZipInfo(f"{_ROOT}/{name}")
    head = stream.tell() + _LOCAL_HEADER_BYTES + len(entry.filename) + _ZIP64_FIELD_BYTES + 4
    padding = -head % _RECORD_ALIGNMENT_BYTES
    entry.extra = struct.pack("<HH", _PADDING_FIELD_ID, padding) + b"Z" * padding
    with archive.open(entry, "w", force_zip64=True) as record:
        for chunk in chunks:
            record.write(chunk)


def _chunks(source: torch.UntypedStorage | StreamedTensor) -> Iterator[Any]:
    for flat in _flat_bytes(source):
        for start in range(0, flat.numel(), _CHUNK_BYTES):
            yield flat[start : start + _CHUNK_BYTES].numpy().data


def _flat_bytes(source: torch.UntypedStorage | StreamedTensor) -> Iterator[torch.Tensor]:
    if isinstance(source, torch.UntypedStorage):
        if source.nbytes():
            yield torch.empty(0, dtype=torch.uint8, device=source.device).set_(source).cpu()
        return
    for piece in source.pieces:
        value = piece().detach().cpu().contiguous()
        if value.dtype != source.dtype:
            raise TypeError(f"piece of dtype {value.dtype} in a tensor of {source.dtype}: pieces share one dtype.")
        if value.numel():
            # A single element counts as contiguous with any stride, so that reshape would keep the stride.
            yield value.as_strided((value.numel(),), (1,)).view(torch.uint8)
