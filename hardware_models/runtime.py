"""Runtimes: what a training framework does by default, as data.

A runtime never decides parallelism; it says how kernels are fused, what a parameter costs in memory, when
gradients travel and where the host waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hardware_models.schema import Bytes, BytesPerParameter, Seconds, SomeBytesPerParameter, Text
from workloads.kinds.base import DTYPE_BYTES, Implementation

Attention = Literal["plain", "flash"]
Reduce = Literal["last", "every"]
TransferMode = Literal["overlapped", "blocking", "interleaved"]
HostWait = Literal["receive", "collective", "gather", "optimizer"]
GradientsFreed = Literal["none", "scattered", "all"]
OptimizerKernels = Literal["fused", "foreach", "per_tensor"]
Way = Literal["forward", "backward"]


@dataclass(frozen=True)
class Runtime:
    """One framework's behaviour. The format of its file is made from these fields (``runtime_files``).

    Attributes:
        name: As users write it.
        implementation: Choices inside operators, for ``workloads``.
        attention: ``plain`` (five operators) or ``flash`` (one fused kernel).
        parameter_bytes, gradient_bytes: Per parameter, in the working copy.
        gathered_parameter_bytes: Per parameter that ZeRO-3 gathers: what travels, and lives while it is used. (What
            ZeRO-1 and 2 gather travels as ``parameter_bytes``.)
        optimizer_bytes: Per parameter: moments, and the fp32 master copy where there is one.
        optimizer_workspace_bytes: Per parameter, alive only during the optimizer step (fp32 copies of
            gradients).
        flat_workspace_bytes: Of that, what is one tensor for all that a rank steps.
        sharded_workspace_bytes: The same under ZeRO, where it is other: per parameter that a rank steps, of each of the
            tensors in which all are flat (in memory; its time is that of ``optimizer_workspace_bytes``).
        gradient_accumulation_bytes: Bytes per element in which gradients of microbatches are summed, and weights that
            stages share.
        reduced_gradient_bytes: In which data parallelism reduces them; None where they are not cast for it.
        adds_gradients: The gradient of each microbatch is added to a buffer by a kernel per parameter.
        casts_gradients: Those are first cast to what they are summed in, by a kernel of their own.
        hands_over_gradients: But the first microbatch's are handed over as they are made (autograd, where an iteration
            begins without gradients), and so are those that ZeRO scatters in each pass.
        adds_gradients_in_products: But those of matrices are added by the product that makes them: no kernel, and no
            tensor of their own.
        copies_gradients: Gradients of whole parameters are copied into buckets to be reduced, and back, each by a
            kernel; a pass ends when all are back.
        bucket_bytes: Of ``gradient_bytes``, what such buckets take in memory: they are there from the start to the
            end of a run, of what replicas reduce whole, and of nothing else.
        sharded_gradient_copies: How often ZeRO-3, and what fills a bucket (``fills_bucket``), goes over whole gradients
            before it scatters them: to write them into one tensor, to divide them.
        parameter_calls_above: ZeRO-3 gathers and scatters each parameter by a call of its own, with the latency and the
            host's time of one; those of at most so many elements stay whole in a microbatch and take none to gather
            there, but are put together of every rank's part once for each. None where a call is for a layer.
        host_seconds_per_list_entry: What such a call costs the host for each rank, where it is given a tensor of each,
            and what the copy of such a part does.
        reduces_by_unit: Gradients that ZeRO-3 does not shard are reduced by units too, each when the backward pass is
            through with it (where FSDP wraps modules, whatever it shards of them).
        reduces_ties_by_use: A weight that several layers of a stage use is reduced once for each of them, where each
            is wrapped for data parallelism on its own.
        one_communicator: What ZeRO-3 gathers and what is reduced over the same ranks travels in turn: they have one
            communicator (torch's process group), which has one stream. Else beside one another.
        regathers_recomputed: ZeRO-3 frees the parameters of a layer that was computed again whole, and gathers them
            once more for its gradients (checkpointing around FSDP units, or modules that give back behind each pass).
        reduces_ties_whole: What stages make of the gradient of a weight that they share is added up before data
            parallelism reduces it, hence whole also where ZeRO-1 leaves a rank its shard of the gradients; else after.
        joins_gathers: Activations that are gathered along another dimension than the first come as a list, whose
            entries are joined (``links.JOINED_GATHER``). Not where the sequence is the first dimension in memory.
        copies_gathered: What ZeRO-3 gathered is copied into the parameters before the layer computes, in one kernel.
        gradient_bucket_bytes: Size of one gradient all-reduce; None is all gradients in one.
        reduce_gradients: ``last`` (after the last microbatch) or ``every``.
        overlap_gradient_sync: Buckets travel while the last backward still runs.
        transfer_mode: ``overlapped``; ``blocking`` (the compute stream waits for the send too); or ``interleaved``,
            which is overlapped under that schedule and blocking under others.
        scatters_transfers: A tensor that several ranks hold alike crosses to the next stage in parts, one from each,
            and is gathered there.
        sums_input_gradients: Where several operators read a tensor, the partial gradients they make of it are added
            before they are reduced, once. Else each operator reduces its own, as Megatron's column-parallel linear, and
            under sequence parallelism gathers the tensor for itself.
        overlaps_input_reductions: Under tensor parallelism the reduction of an operator's input gradient travels while
            its weight gradients are made, and under sequence parallelism the gather of its input while its input
            gradient is made.
        sends_attention_mask: The mask, one activation per pair of tokens, crosses to the next stage with each
            microbatch, whole to every rank (of models with attention in separate operators).
        host_waits: Events at which the host waits for the device: what a pass receives, where transfers are blocking;
            what ZeRO-3 gathered for a layer, and all before it; the gradient norm.
        has_sequence_parallelism: The framework has Megatron's. Plans with it are simulated under one that has not all
            the same, and a note says so (``simulator.remarks``).
        recomputes_flash_attention: The framework computes it again alone where it is told to (selective recomputation).
            Plans in which it does are simulated under one that never does all the same, and a note says so.
        keeps_gathered_inputs: Under sequence parallelism an operator keeps the gathered input for backward;
            else its shard, gathered again.
        copies_parts: What an operator reads of a tensor that a rank has whole is copied even where it lies in one
            piece; else it is a view there, and holds the whole.
        keeps_gathered_shards: What an operator has gathered and keeps does not replace the shard that it gathered from:
            that is kept as well.
        recompute_stops_early: Recomputation ends once the last saved tensor is back.
        recompute_holds_ends: What a segment makes for those behind it, and the gradients that it gets for that, are
            there until its backward pass is through (reentrant checkpointing, whose backward has both as locals).
        communication_buffer_bytes, context_bytes: Device memory outside the allocator.
        host_seconds_per_kernel: Overrides the GPU type's ``launch_s``; None keeps it.
        host_seconds_per_operator: What the framework itself spends on the host before an operator's kernels
            (module calls, dispatch, autograd nodes): forward, and backward. One that the framework has no single
            operation for (an unfused softmax) costs it for each of those it is made of (``Kind.num_calls``).
        host_seconds_per_pass: What the framework spends on the host before each forward or backward pass of a
            microbatch through a stage (schedule, data, bookkeeping).
        host_runs_ahead: The host launches what comes next while the device works. Else it never does (every launch is
            waited for, or the times are those of operators timed one by one): the forward and the backward pass of
            an operator take the longer of its kernels and its host time, and launching a collective delays it.
        host_seconds_per_collective: What the framework spends on the host for a collective beyond one launch (Python
            of the call, events between streams): once, and for each rank of its group that the same process drives
            (0 where each rank has a process of its own).
        handover_s: How long a device stands still around a collective between operators, beyond what that takes alone:
            its computation hands over to the communicator's stream and is handed back, and the slowest rank is waited
            for. A host that is behind launches meanwhile; else gathers of shards of the sequence wait no longer than
            the operator took that has just made them. Not for what travels beside computation, gathers and reductions
            of data parallelism, nor transfers.
        prefetches_gathers: Parameters of the next layer are gathered while this one computes; else
            each gather holds up its layer.
        keeps_stage_outputs: What a pipeline stage sends is held until its backward pass.
        frees_gradients: Which gradients do not outlive an iteration, so that the first backward pass makes them anew:
            ``none``, ``scattered`` (those that ZeRO-2 and 3 reduce in each pass) or ``all``.
        moments_at_first_step: The optimizer's moments are made when it first steps, in what the first iteration's
            activations left (torch.optim; Apex's FusedAdam, of which deepspeed 0.5.10 has a copy); else before.
        tied_gradients_wait: Gradients of a weight that several operators of a stage use are added up before they are
            handed over, the first of them waiting for the others (autograd); else each is added at once.
        refreshes_in_place: What ZeRO-1 and 2 gather after the optimizer step lands in the parameters; else in a buffer
            for all of them, from which it is copied.
        refreshes_in_forward: What ZeRO-1 and 2 gather after the optimizer step travels beside the next forward pass, as
            what ZeRO-3 gathers; of stages that have parameters of ZeRO-3 besides, after the step all the same.
        scatters_anew: The sums that ZeRO-1 leaves a rank of whole gradients are tensors of their own, which stay
            beside those through the optimizer step and what follows it; else they lie in them.
        holds_next_unit: Passes in which what ZeRO-3 gathers of the next unit is there while one computes, by the order
            of the host, in which memory is taken: where it asks for the next only when this one was given back, neither
            is there beside the other, though the gather travels meanwhile. None: both where gathers are prefetched.
        wraps_final_norms: A norm that ends the repeated layers is a unit of its own to ZeRO; else it is in one with
            what follows, embedding or head.
        matmul_workspaces: How many threads multiply, each of which holds a workspace of the library of products in
            the allocator's memory all the time (``GpuType.matmul_workspace_bytes``); 0 where that is not of it.
        keeps_root_gathered: ZeRO-3 parameters outside the repeated layers stay gathered from a forward pass to the end
            of its backward pass, as one unit; their gradients are reduced as one.
        optimizer_kernels: ``fused`` over all tensors; or plain operations, over lists of tensors (``foreach``) or
            ``per_tensor``.
        adam_operations: How many plain operations Adam is, and how many elements they read and write of a parameter, in
            four bytes each. Torch's single-tensor form: mul and add on the first moment (2 + 3), mul and addcmul on the
            second (2 + 3), sqrt, division by the bias correction and add of epsilon on a temporary (2 + 2 + 2), addcdiv
            on the parameter (4). AdamW over lists has as many: one lerp on the first moment (3), the decay of the
            parameter (2).
        reduces_to_owners: ZeRO levels under which gradients are summed to a shard on each rank by one reduce to each
            owner after the other (``links.OWNER_REDUCE``), not by a reduce-scatter.
        fills_bucket: ZeRO levels under which gradients are written, as they are made, into a buffer of
            ``gradient_bucket_bytes`` that each backward pass makes, whatever there is to fill it; no others are whole
            but those that it does not hold. Two of them where reductions overlap.
        flattens_gradients: Whole gradients are copied into one tensor to be reduced under ZeRO-1, of up to
            ``gradient_bucket_bytes`` at a time, when the last backward pass is through (without ZeRO too, where the
            step takes more).
        drops_gradients: Of whole gradients that ZeRO-1 has reduced, those that a rank does not step go before the step.
        scatters_under_zero1: ZeRO-1 sums gradients to a shard on each rank; else every rank has them whole.
        flattens_sharded: What ZeRO-3 shards of a layer is one flat tensor to the optimizer (torch's first FSDP,
            FairScale).
        gradient_clipping: The global gradient norm is computed each step.
        loss_scaling: Gradients are unscaled and checked for infinities each step.
        gradient_pass_bytes: What a step reads and writes of gradients before the optimizer, bytes per parameter: of all
            that a rank holds (zeroing, averaging) and of what it steps (unscaling, norm). None: one pass over what is
            summed for clipping, two for unscaling.
        sources: One line per field.
    """

    name: str
    implementation: Implementation
    attention: Attention
    parameter_bytes: SomeBytesPerParameter
    gathered_parameter_bytes: SomeBytesPerParameter
    gradient_bytes: BytesPerParameter
    optimizer_bytes: BytesPerParameter
    optimizer_workspace_bytes: BytesPerParameter
    gradient_accumulation_bytes: Literal[2, 4]
    adds_gradients: bool
    gradient_bucket_bytes: Bytes | None
    reduce_gradients: Reduce
    overlap_gradient_sync: bool
    transfer_mode: TransferMode
    scatters_transfers: bool
    host_waits: tuple[HostWait, ...]
    keeps_gathered_inputs: bool
    recompute_stops_early: bool
    communication_buffer_bytes: Bytes
    context_bytes: Bytes
    host_seconds_per_kernel: Seconds | None
    host_seconds_per_operator: tuple[Seconds, Seconds]
    host_seconds_per_pass: Seconds
    host_seconds_per_collective: tuple[Seconds, Seconds]
    prefetches_gathers: bool
    keeps_stage_outputs: bool
    frees_gradients: GradientsFreed
    refreshes_in_place: bool
    keeps_root_gathered: bool
    optimizer_kernels: OptimizerKernels
    gradient_clipping: bool
    loss_scaling: bool
    sources: Mapping[str, Text]
    adam_operations: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=5)]] = (8, 20)
    flat_workspace_bytes: BytesPerParameter = 0
    sharded_workspace_bytes: tuple[BytesPerParameter, ...] | None = None
    flattens_gradients: bool = False
    drops_gradients: bool = False
    scatters_under_zero1: bool = True
    reduces_to_owners: tuple[Literal[1, 2, 3], ...] = ()
    fills_bucket: tuple[Literal[2, 3], ...] = ()
    gradient_pass_bytes: tuple[BytesPerParameter, BytesPerParameter] | None = None
    sends_attention_mask: bool = False
    host_runs_ahead: bool = True
    sums_input_gradients: bool = True
    overlaps_input_reductions: bool = False
    reduced_gradient_bytes: Literal[2, 4] | None = None
    casts_gradients: bool = False
    hands_over_gradients: bool = False
    adds_gradients_in_products: bool = False
    copies_gradients: bool = False
    bucket_bytes: BytesPerParameter = 0
    sharded_gradient_copies: Annotated[int, Field(ge=0, le=8)] = 0
    copies_gathered: bool = False
    joins_gathers: bool = False
    reduces_ties_by_use: bool = False
    reduces_by_unit: bool = False
    one_communicator: bool = False
    regathers_recomputed: bool = False
    reduces_ties_whole: bool = False
    parameter_calls_above: Annotated[int, Field(ge=0)] | None = None
    flattens_sharded: bool = False
    host_seconds_per_list_entry: Seconds = 0.0
    handover_s: Seconds = 0.0
    holds_next_unit: tuple[Way, ...] | None = None
    wraps_final_norms: bool = False
    matmul_workspaces: Annotated[int, Field(ge=0, le=64)] = 0
    recompute_holds_ends: bool = False
    refreshes_in_forward: bool = False
    scatters_anew: bool = False
    keeps_gathered_shards: bool = False
    copies_parts: bool = False
    has_sequence_parallelism: bool = True
    recomputes_flash_attention: bool = True
    moments_at_first_step: bool = True
    tied_gradients_wait: bool = True

    @property
    def state_bytes_per_parameter(self) -> float:
        """Bytes per parameter that live through the whole iteration."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def tied_gradient_bytes(self) -> int:
        """Bytes per element of a gradient that waits (``tied_gradients_wait``); under autocast it was cast back."""
        if not self.tied_gradients_wait:
            return 0
        return DTYPE_BYTES["fp32"] if self.implementation.autocast else self.implementation.activation_bytes

    @property
    def travelling_gradient_bytes(self) -> int:
        """Bytes per element of gradients that data parallelism reduces."""
        return self.reduced_gradient_bytes or self.gradient_accumulation_bytes

    def workspace_bytes(self, *, sharded: bool) -> tuple[float, tuple[float, ...]]:
        """Return what a step works in per parameter that a rank steps, under ZeRO or not: of each, of flat tensors."""
        if sharded and self.sharded_workspace_bytes is not None:
            return 0.0, self.sharded_workspace_bytes
        return self.optimizer_workspace_bytes - self.flat_workspace_bytes, (self.flat_workspace_bytes,)

    @property
    def waiting_gradient_share(self) -> float | None:
        """How wide ZeRO-2 and 3 keep whole gradients until their unit is reduced, as a share of what is reduced.

        They stay as the products made them, and are then copied into what is reduced: FSDP2 with ``reduce_dtype``
        (torch 2.13.0, ``_fsdp_collectives.py``), and where what is sharded is one flat tensor, whose split autograd
        undoes (torch's first FSDP, FairScale). None where each is written into that as it is made.
        """
        share = min(1.0, self.implementation.activation_bytes / self.travelling_gradient_bytes)
        waits = self.flattens_sharded or (self.sharded_gradient_copies > 0 and share < 1)
        return share if waits else None

    def blocks_on_transfers(self, schedule: str) -> bool:
        """Return whether a device computes on only when what it sent has arrived."""
        return self.transfer_mode == "blocking" or (self.transfer_mode == "interleaved" and schedule != "interleaved")

    def host_waits_to_receive(self, schedule: str) -> bool:
        """Return whether the host waits for what a pass receives, which nothing does where transfers are overlapped."""
        return "receive" in self.host_waits and self.blocks_on_transfers(schedule)

    def holds_next(self, way: Way) -> bool:
        """Return whether gathered parameters of the next unit are there while one computes (``holds_next_unit``)."""
        return self.prefetches_gathers if self.holds_next_unit is None else way in self.holds_next_unit

    @property
    def outside_allocator_bytes(self) -> int:
        """Device memory that the caching allocator never sees."""
        return self.context_bytes + self.communication_buffer_bytes
