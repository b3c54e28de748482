"""From token ids or images to features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from workloads.kernels import Kernel, Matmul, MemoryBound
from workloads.kinds.attributes import flag, integer, real, require_rank, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DTYPE_BYTES,
    FORWARD,
    Attributes,
    InternalCollective,
    Kind,
    Local,
    Parameter,
    Saved,
    Shape,
    Split,
    SplitTable,
)
from workloads.kinds.registry import register
from workloads.placements import PARTIAL, REPLICATE, Shard


@register
class Embedding(Kind):
    """Token look-up, plus optional position and segment tables and dropout: ``(B, S) -> (B, S, H)``.

    A vocabulary split leaves a partial sum (every rank adds the rows it has), so the all-reduce follows from the
    consumer. Under sequence parallelism Megatron-LM sums inside, adds positions, and only drops in its part of the
    sequence (``vocab_sequence``; language_model.py, Embedding): the mask is that part's (Korthikanti et al. 2022,
    Section 4.3). GPT and T5 take it; BERT's graph has a norm before its dropout, LLaMA's no dropout.

    Attributes of the operator: ``vocab``, ``hidden``, ``positions`` (rows of the position table, 0: none),
    ``segments`` (rows of the segment table, 0: none), ``dropout`` (probability).
    """

    name = "embedding"
    has_dropout_state = True

    def input_dtype(self, index: int) -> str:
        return "index"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 2, "(samples, tokens)")
        positions = integer(attributes, "positions", 0)
        if positions and inputs[0][1] > positions:
            raise ValueError(f"embedding has {positions} positions, got a sequence of {inputs[0][1]} tokens")
        return ((*inputs[0], integer(attributes, "hidden")),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        hidden = integer(attributes, "hidden")
        rows = {"weight": "vocab", "positions": "positions", "segments": "segments"}
        return tuple(
            Parameter(name, (integer(attributes, count, 0), hidden))
            for name, count in rows.items()
            if integer(attributes, count, 0)
        )

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        count = sum(1 for name in ("vocab", "positions", "segments") if integer(attributes, name, 0))
        own = {
            "vocab": Split(
                (REPLICATE,), (PARTIAL,), (Shard(0), *(REPLICATE,) * (count - 1)), whole_gradients=(1, 2)
            ),
            "vocab_sequence": Split(
                (REPLICATE,), (Shard(1),), (Shard(0), *(REPLICATE,) * (count - 1)), whole_gradients=(1, 2)
            ),
            "column": Split((REPLICATE,), (Shard(2),), (Shard(1),) * count),
            "sequence": Split((Shard(1),), (Shard(1),), (REPLICATE,) * count),
        }
        return SplitTable(1, 1, count, own).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        vocab = integer(attributes, "vocab")
        return {"vocab": vocab, "vocab_sequence": vocab, "column": integer(attributes, "hidden")}.get(split)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        kept = (Saved("input:0"),)
        if real(local.attributes, "dropout", 0.0) > 0:
            return (*kept, Saved("mask", local.outputs[0], local.implementation.mask_dtype))
        return kept

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        kept, mask = size_bytes(local, local.outputs), float(prod(local.outputs[0]))
        size = size_bytes(local, [self._found(local)])
        tokens = float(DTYPE_BYTES["index"] * prod(local.inputs[0]))
        position_bytes = size / local.outputs[0][0]  # one sequence: the same for every sample
        positions = integer(local.attributes, "positions", 0) > 0
        segments = integer(local.attributes, "segments", 0) > 0
        drops = real(local.attributes, "dropout", 0.0) > 0
        found: list[Kernel] = []
        if phase == FORWARD:
            found.append(MemoryBound(size + tokens, size, "gather"))
            if positions:
                found += [
                    MemoryBound(position_bytes, position_bytes, "gather"),
                    MemoryBound(size + position_bytes, size),
                ]
            if segments:
                found += [MemoryBound(size + tokens, size, "gather"), MemoryBound(2 * size, size)]
            if kept < size:
                found.append(MemoryBound(kept, kept))
            if drops:
                found.append(MemoryBound(kept, kept + mask, "random"))
            return found
        if phase == BACKWARD_INPUT:
            return [MemoryBound(kept + mask, kept)] if drops else []
        # A dense gradient: set to zero, then scatter-add.
        found = [
            MemoryBound(0.0, size_bytes(local, local.parameters[:1])),
            MemoryBound(size + tokens, size, "gather"),
        ]
        if positions:
            found += [
                MemoryBound(size, position_bytes, "reduction"),
                MemoryBound(position_bytes, position_bytes),
            ]
        if segments:
            found.append(MemoryBound(size + tokens, size_bytes(local, local.parameters[-1:]), "reduction"))
        return found

    @staticmethod
    def _found(local: Local) -> Shape:
        """Return the shape of what is looked up: longer than the output where only a part of the sequence goes on."""
        return (*local.inputs[0], local.outputs[0][2])

    def internal_collectives(self, phase: str, split: str, local: Local) -> tuple[InternalCollective, ...]:
        if split != "vocab_sequence" or phase == BACKWARD_WEIGHT:
            return ()
        collective = "all_reduce" if phase == FORWARD else "all_gather"
        return (InternalCollective(collective, self._found(local), "activation"),)

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        # What all ranks' rows sum up to, and the gradient of all of it.
        found = self._found(local)
        return ((found, "activation"),) if phase != BACKWARD_INPUT and found != local.outputs[0] else ()

    def num_calls(self, phase: str, local: Local) -> int:
        # Look-ups, their sum and dropout; in backward dropout, and a node per table.
        if phase == FORWARD:
            return len(self.kernels(phase, local))
        return len(self.kernels(phase, local)) if phase == BACKWARD_INPUT else len(local.parameters)


@register
class PatchEmbedding(Kind):
    """Image patches through a linear, with a class token and positions: ``(B, C, Y, X) -> (B, P + 1, H)``.

    Attributes of the operator: ``patch`` (side, pixels), ``channels``, ``image`` (side, pixels), ``hidden``,
    ``class_token``, ``positions`` (learned, default true), ``dropout``.
    """

    name = "patch_embedding"
    has_dropout_state = True

    @staticmethod
    def _num_tokens(attributes: Attributes) -> int:
        side = integer(attributes, "image") // integer(attributes, "patch")
        return side * side + flag(attributes, "class_token", True)

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        image, patch = integer(attributes, "image"), integer(attributes, "patch")
        wanted = (integer(attributes, "channels"), image, image)
        if tuple(inputs[0][1:]) != wanted or image % patch:
            raise ValueError(
                f"patch_embedding needs images of shape {wanted} whose side is a multiple of patch={patch}, "
                f"got {inputs[0][1:]}"
            )
        return ((inputs[0][0], self._num_tokens(attributes), integer(attributes, "hidden")),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        hidden, patch = integer(attributes, "hidden"), integer(attributes, "patch")
        found = [
            Parameter("weight", (hidden, integer(attributes, "channels") * patch * patch)),
            Parameter("bias", (hidden,)),
        ]
        if flag(attributes, "positions", True):
            found.append(Parameter("positions", (self._num_tokens(attributes), hidden)))
        if flag(attributes, "class_token", True):
            found.append(Parameter("class_token", (1, hidden)))
        return tuple(found)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        extra = flag(attributes, "positions", True) + flag(attributes, "class_token", True)
        parameters = (Shard(0), Shard(0), Shard(1), Shard(1))[: 2 + extra]
        own = {"column": Split((REPLICATE,), (Shard(2),), parameters)}
        return SplitTable(1, 1, 2 + extra, own).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        return integer(attributes, "hidden") if split == "column" else None

    def saved(self, local: Local) -> tuple[Saved, ...]:
        kept = (Saved("input:0"),)
        if real(local.attributes, "dropout", 0.0) > 0:
            return (*kept, Saved("mask", local.outputs[0], local.implementation.mask_dtype))
        return kept

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        samples, tokens, hidden = local.outputs[0]
        rows = samples * (tokens - flag(local.attributes, "class_token", True))
        window = local.parameters[0][1]
        size, mask = size_bytes(local, local.outputs), float(prod(local.outputs[0]))
        image = size_bytes(local, local.inputs)
        drops = real(local.attributes, "dropout", 0.0) > 0
        if phase == FORWARD:
            # Patches gathered, product, class token put in front, positions added.
            passes = flag(local.attributes, "class_token", True) + flag(local.attributes, "positions", True)
            found: list[Kernel] = [
                MemoryBound(image, image),
                Matmul(m=rows, n=hidden, k=window),
                *(MemoryBound(size, size) for _ in range(passes)),
            ]
            return [*found, MemoryBound(size, size + mask, "random")] if drops else found
        if phase == BACKWARD_INPUT:
            return [MemoryBound(size + mask, size)] if drops else []
        positions = [MemoryBound(size, size / samples, "reduction")]
        return [
            *(positions if flag(local.attributes, "positions", True) else []),
            Matmul(m=hidden, n=window, k=rows, role="weight_gradient"),
            MemoryBound(size, float(hidden * local.element_bytes), "reduction"),
        ]
