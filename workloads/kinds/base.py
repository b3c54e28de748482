"""The contract of an operator kind: shapes, parameters, saved tensors, kernels and splits.

A kind is stateless. Everything it says about work and memory is a function of *local* shapes, that is,
of shapes after the mesh has cut them; so one definition serves every split and every degree. Sizes and
collectives are derived from it (``workloads/local.py``), never typed in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from workloads.kernels import Kernel
from workloads.placements import PARTIAL, REPLICATE, Placement, Shard

Shape = tuple[int, ...]
Attributes = Mapping[str, int | float | bool | str]
Dtype = Literal["fp16", "bf16", "fp32", "tf32"]
"""What activations and weights may be."""

FORWARD = "forward"
BACKWARD_INPUT = "backward_input"
BACKWARD_WEIGHT = "backward_weight"
PHASES = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "mask": 1, "index": 8}
"""Bytes per element. ``mask`` is a boolean stored as a byte, ``index`` an int64 token id."""


@dataclass(frozen=True)
class Implementation:
    """The choices a framework makes inside operators; a Runtime provides them.

    Attributes:
        dtype: Type of activations and of weights in the matmuls ("fp16", "bf16", "fp32", "tf32").
        autocast: Weights of products are cast from fp32 for each pass and kept cast until their gradient, which is cast
            back; norms and a transformer's residuals are in fp32 (``torch.autocast``).
        fused_softmax: Scale, mask and softmax in one kernel; else three, computed and kept in fp32.
        adds_mask: Unfused, the mask is added to the scores in their own type, and has no gradient; else scores are
            filled where it says so, in fp32, and so are gradients.
        slices_packed: Queries, keys and values are views of the packed tensor, which autograd goes back through one by
            one: each gradient is copied into a packed tensor of zeros, and these are added. Products of scores and of
            values copy what they read of it, rotary positions turn all of it; else it is taken apart and put together
            at once.
        fused_bias_activation: Bias and activation in one kernel.
        fused_bias_dropout: Bias, dropout and residual add in one kernel; else three.
        fused_rotary: Rotary positions in one pass over queries and keys; else in plain operations.
        fused_gate: SwiGLU in one kernel where bias and activation are; else it is a SiLU, which is kept, and a product.
        packed_rotary: Rotated queries and keys are new tensors beside the packed one, which the values keep alive.
        fused_norm: RMS norm in one kernel that keeps its input and statistics; else several passes, and the
            normalised tensor is kept too. (Layer norm is one kernel in every framework.)
        persistent_norms: Norms whose blocks stay for many tokens, so that gradients take one pass over input and
            gradient, in which each block sums up its part of the weights' (Apex's FastLayerNorm, Transformer Engine);
            others take two passes for the input's and one for the weights'.
        norms_by_blocks: Norms of PyTorch 2 (aten/native/cuda/layer_norm_kernel.cu): a block of threads a row, whose
            second pass over what it has read comes from the cache; gradients of weights by a block for 32 columns,
            which goes down all rows, unless there are more than 65,536 of them and few columns.
        logits_dtype: Type in which the loss is computed.
        operators_are_calls: An operator costs the host one dispatch, whatever operations it is made of (our executor,
            whose hooks and Python go around operators); else each operation one (`Kind.num_calls`).
        bias_in_matmul: The matmul library adds a bias that nothing else fuses (cublasLt epilogue, PyTorch >=
            1.13); else it is a kernel of its own.
        fused_softmax_multiple: The fused softmax kernel works only where samples x local heads is a multiple
            of this (4 in Megatron-LM 2021, ``fused_softmax.py``); elsewhere the unfused one runs.
        fused_softmax_longest: And with more than 16 and at most so many keys, queries and keys in fours (the same
            file; that short rows go by eights is not followed); None is any.
        fused_loss: Cross entropy in torch's two kernels; else Megatron's chain of six.
        flash_causal_skip: Flash attention skips the masked half of causal scores.
        sequence_first: Activations have the sequence as their first dimension, flash attention wants samples first: it
            is given copies of queries, keys and values, and what it made of several samples is copied for the
            projection, which keeps the copy (Megatron-LM's ParallelAttention).
        repeats_groups: Flash attention is given keys and values repeated for each query head of their group.
        copies_groups: Queries of several groups are copied out of where they lie with keys and values for flash
            attention, whose result is laid out as they are then, and copied for the projection.
        holds_operands: What an operator read and kept is there until its whole backward pass is through; else each of
            the operations that it consists of lets go of its own.
        flash_generation: 1 for the Triton port of the flash attention of 2022, 2 for FlashAttention-2.
        keeps_scores: The unfused softmax keeps its scaled scores besides its result (PyTorch of 2022 and before,
            whose division keeps its operand).
        elementary: Every operation of the graph is a kernel, as in TensorFlow 1: dropout draws, shifts, rounds, scales
            and multiplies, and keeps its factors as numbers; GELU, layer norm and softmax are chains too, and keep
            what their gradients need.
        loss_keeps_logits: The logits outlive the loss, as an output of the model.
        loss_clones_logits: Megatron's chain works on a copy of the logits and exponentiates into a new tensor, while
            the logits themselves wait as the stage's output (Megatron-LM before its 2.0).
        loss_subtracts_anew: Megatron's chain subtracts the maximum into a new tensor, beside the logits as the product
            left them and as they were cast (its core of 2023); else in place, in the cast ones.
        loss_temporaries: Tensors of the size of the logits, in ``logits_dtype``, that torch's loss makes besides in
            backward: the gradient of the log-softmax, set to zero and filled, and of the logits. 1 is a loss whose
            gradient is one kernel.
        loss_metrics: Cross entropies of the logits, in fp32 and forward alone, that a trainer takes besides the loss
            after each microbatch (timed as part of its backward pass; what they make is gone before the next).
        channels_last: Channels of a pixel are side by side (torch's ``channels_last``), so that convolutions of 16-bit
            numbers copy no images into tensor cores' layout. Nothing else knows of it.
        keeps_score_buffer: Products of queries and keys are given a buffer as large as their result to add to, times
            nothing; all of a device share the largest, which is never given back.
    """

    dtype: Dtype = "fp16"
    autocast: bool = False
    fused_softmax: bool = True
    adds_mask: bool = False
    slices_packed: bool = False
    fused_bias_activation: bool = True
    fused_bias_dropout: bool = True
    fused_norm: bool = True
    persistent_norms: tuple[Literal["layer_norm", "rms_norm"], ...] = ()
    norms_by_blocks: bool = False
    fused_rotary: bool = True
    fused_gate: bool = True
    packed_rotary: bool = False
    logits_dtype: Dtype = "fp32"
    bias_in_matmul: bool = False
    fused_softmax_multiple: Annotated[int, Field(ge=1, le=1024)] = 1
    fused_softmax_longest: Annotated[int, Field(ge=17, le=2**20)] | None = None
    fused_loss: bool = False
    flash_causal_skip: bool = True
    sequence_first: bool = False
    repeats_groups: bool = False
    copies_groups: bool = False
    holds_operands: bool = False
    flash_generation: Literal[1, 2] = 2
    keeps_scores: bool = False
    elementary: bool = False
    loss_keeps_logits: bool = False
    loss_clones_logits: bool = False
    loss_subtracts_anew: bool = False
    loss_temporaries: Annotated[int, Field(ge=0, le=8)] = 2
    loss_metrics: Annotated[int, Field(ge=0, le=8)] = 0
    keeps_score_buffer: bool = False
    channels_last: bool = False
    operators_are_calls: bool = False

    @property
    def mask_dtype(self) -> str:
        """What a dropout mask is kept as: a byte, or a number where each operation is a kernel."""
        return "activation" if self.elementary else "mask"

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def residual_bytes(self) -> int:
        """Bytes of one element of what a transformer's blocks add up and its norms read."""
        return DTYPE_BYTES["fp32"] if self.autocast else self.activation_bytes

    @property
    def logits_bytes(self) -> int:
        """Bytes of one logit as the loss sees it."""
        return DTYPE_BYTES[self.logits_dtype]

    @property
    def casts_logits(self) -> bool:
        """Whether the loss works in another type than the logits have. TF32 products leave fp32."""
        kept, wanted = ("fp32" if dtype == "tf32" else dtype for dtype in (self.dtype, self.logits_dtype))
        return kept != wanted


@dataclass(frozen=True)
class Parameter:
    """One trainable tensor. ``tie`` names tensors shared between operators (tied embeddings)."""

    name: str
    shape: Shape
    tie: str | None = None


@dataclass(frozen=True)
class Saved:
    """A tensor the forward pass keeps for the backward pass.

    Attributes:
        ref: ``"input:0"`` or ``"output:0"`` for the operator's own tensors (shared with whoever else keeps
            the same one), or a private name such as ``"mask"``.
        shape: Local shape; ignored for references.
        dtype: Key of DTYPE_BYTES, or ``"activation"``; ignored for references.
    """

    ref: str
    shape: Shape = ()
    dtype: str = "activation"


RESULTS, KEPT, GRADIENTS = "results", "kept", "output gradients"
"""What a phase makes (outputs or input gradients), private tensors that forward keeps, and what backward is given."""

LIBRARY = "library's workspace"
"""What the library of a phase's kernels works in (cuDNN): one allocation, given back at once."""


@dataclass(frozen=True)
class MemoryStep:
    """One step in the order in which a phase takes memory.

    Attributes:
        name: A buffer, ``RESULTS``, ``KEPT``, which may be given back where recomputation makes it again, or
            ``GRADIENTS``, which backward may give back before it is through.
        tensor: Shape and dtype of a buffer that is taken.
        gives: It is given back.
    """

    name: str
    tensor: tuple[Shape, str] | None = None
    gives: bool = False


@dataclass(frozen=True)
class InternalCollective:
    """A collective inside an operator, over the axis of the split that causes it."""

    collective: str
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Split:
    """Placements of every tensor of an operator over one mesh axis.

    Attributes:
        inputs, outputs: One placement per input and output.
        parameters: One placement per parameter, in the order of ``Kind.parameters``.
        shares_work: False where every rank repeats the same computation (``replicate``). Where True, the
            gradient of a replicated input or parameter is a partial sum.
        whole_gradients: Indices of replicated parameters that are applied after the sum over the axis (the
            bias of a row split), so that every rank computes their whole gradient all the same.
        part_gradients: The same where that sum is scattered along the sequence: every rank computes the gradient from
            its part of the tokens.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    parameters: tuple[Placement, ...] = ()
    shares_work: bool = True
    whole_gradients: tuple[int, ...] = ()
    part_gradients: tuple[int, ...] = ()

    def input_gradient(self, index: int) -> Placement:
        """Return the placement in which backward produces the gradient of input ``index``."""
        placement = self.inputs[index]
        if isinstance(placement, Shard):
            return placement
        return PARTIAL if self.shares_work else REPLICATE

    def output_gradient(self, index: int) -> Placement:
        """Return the placement in which backward needs the gradient of output ``index``."""
        placement = self.outputs[index]
        return placement if isinstance(placement, Shard) else REPLICATE

    def parameter_gradient(self, index: int) -> Placement:
        """Return the placement in which backward produces the gradient of parameter ``index``."""
        placement = self.parameters[index]
        if isinstance(placement, Shard):
            return placement
        return PARTIAL if self.shares_work and index not in self.whole_gradients else REPLICATE


@dataclass(frozen=True)
class Local:
    """What one rank sees of an operator: local shapes, and the choices of the implementation.

    Attributes:
        attributes: The operator's attributes (global, e.g. ``heads`` of the whole model).
        inputs, outputs, parameters: Local shapes.
        implementation: Framework choices.
        axes: ``(split, size)`` per mesh axis of more than one rank.
    """

    attributes: Attributes
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    parameters: tuple[Shape, ...]
    implementation: Implementation
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element."""
        return self.implementation.activation_bytes

    def degree(self, split: str) -> int:
        """Return the product of the axes with ``split``."""
        return prod(size for name, size in self.axes if name == split)


class Kind(ABC):
    """One sort of operator. Subclasses are registered by ``workloads.kinds.register``.

    Shapes have the batch first: ``(samples, ...)``.
    """

    name: ClassVar[str]
    num_inputs: ClassVar[int] = 1
    has_dropout_state: ClassVar[bool] = False
    takes_library_memory: ClassVar[bool] = False
    """Its kernels are of a library that works in memory by rules of its own (cuDNN): a profile says how much. What the
    model has of it is the step ``LIBRARY`` forward, if any, and the last of ``workspace`` for gradients of weights."""
    parts_late: ClassVar[bool] = False
    """Backward comes to the product that has the weights only after work of its own (a loss before its projection): the
    second half of a split backward needs the gradient there (``workspace`` of BACKWARD_WEIGHT), and not what that work
    was done from."""

    def arity(self, attributes: Attributes) -> int:
        """Return how many inputs an operator with these attributes has."""
        return self.num_inputs

    @abstractmethod
    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        """Return output shapes from input shapes; raise ValueError if the inputs do not fit."""

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        """Return the trainable tensors (global shapes)."""
        return ()

    @abstractmethod
    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        """Return the legal splits by name, ``batch`` and ``replicate`` included."""

    def input_dtype(self, index: int) -> str:
        """Return the dtype of input ``index``: a key of DTYPE_BYTES, or ``"activation"``."""
        return "activation"

    def output_dtype(self, index: int) -> str:
        """Return the dtype of output ``index``: a key of DTYPE_BYTES, or ``"activation"``."""
        return "activation"

    def stated_time_s(self, phase: str, local: Local) -> float | None:
        """Return the duration the kind itself states (a row of a profile), or None: ask its kernels."""
        return None

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        """Return what the product of axis sizes of ``split`` must divide (heads, ...), or None."""
        return None

    @abstractmethod
    def saved(self, local: Local) -> tuple[Saved, ...]:
        """Return what forward keeps for backward, local shapes."""

    @abstractmethod
    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        """Return the kernels of one phase (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT), in launch order."""

    def gradient_sums(self, local: Local) -> list[Kernel]:
        """Return the last kernels of BACKWARD_INPUT, if they add gradients of the last input to those of other readers.

        Autograd makes such sums between operators: a profile has them with the operator that goes backward next.
        """
        return []

    def num_calls(self, phase: str, local: Local) -> int:
        """Return how many operations of the framework a phase is: each costs the host its dispatch.

        Both gradients are one node of the graph that backward walks: counted with the first of them. Kinds that a
        framework has no single operation for override this (an unfused softmax with its casts, scale and mask).
        """
        return 0 if phase == BACKWARD_WEIGHT else 1

    def internal_collectives(self, phase: str, split: str, local: Local) -> tuple[InternalCollective, ...]:
        """Return collectives inside the operator for an axis with ``split`` (not derivable from outside)."""
        return ()

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        """Return (shape, dtype) of buffers that live only during the phase, besides outputs and gradients."""
        return ()

    def memory_steps(self, phase: str, local: Local) -> tuple[MemoryStep, ...]:
        """Return in what order a phase takes memory and gives it back, of ``FORWARD`` and ``BACKWARD_INPUT``.

        Where nothing is known of it, all of ``workspace`` lies beside what is made. What is kept is given back by the
        first pass of a recomputed segment alone. What ``BACKWARD_INPUT`` leaves is given back when the product of the
        weight gradients has what it is made of.
        """
        taken = [MemoryStep(str(number), tensor) for number, tensor in enumerate(self.workspace(phase, local))]
        kept = (MemoryStep(KEPT), MemoryStep(KEPT, gives=True)) if phase == FORWARD else ()
        return (*taken, MemoryStep(RESULTS), *kept, *(MemoryStep(step.name, gives=True) for step in taken))

    def lasting_buffer(self, local: Local) -> tuple[tuple[Shape, str], ...]:
        """Return (shape, dtype) of buffers that are never given back; operators of one device share the largest."""
        return ()


@dataclass(frozen=True)
class SplitTable:
    """Helper for kinds: the two splits that every kind has, plus its own."""

    num_inputs: int
    num_outputs: int
    num_parameters: int
    own: Mapping[str, Split] = field(default_factory=dict)

    def build(self) -> dict[str, Split]:
        """Return all splits by name."""
        table = {
            "batch": Split(
                inputs=(Shard(0),) * self.num_inputs,
                outputs=(Shard(0),) * self.num_outputs,
                parameters=(REPLICATE,) * self.num_parameters,
            ),
            "replicate": Split(
                inputs=(REPLICATE,) * self.num_inputs,
                outputs=(REPLICATE,) * self.num_outputs,
                parameters=(REPLICATE,) * self.num_parameters,
                shares_work=False,
            ),
        }
        table.update(self.own)
        return table
