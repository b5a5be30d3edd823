"""ZeRO-1 and 2 with master weights and moments in host memory, which pass through the GPU to be stepped there.

DeepSpeed's own offload lets the host's cores step, and sends gradients to the host after every micro-batch: small
micro-batches drown in transfers, large ones need full recompute. Here gradients stay on the GPU until the step, as
without offload, and each group's states then come down, are stepped by the same Adam and go back up, the two
directions of PCIe at work together. The numbers are those of the run without offload, to the bit where its groups are
the same; smaller ones add up the gradient norm in another order.

24 bytes a parameter over PCIe each step: XuanYuan-6B's step takes 1.5 s on an H200 (LOGBOOK.md), whatever the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from finlm.plan.buckets import STREAM_SETS
from finlm.train.one_pass import OnePassZero

MOMENTS = ("exp_avg", "exp_avg_sq")
OWN_PAGES_BYTES = 64 << 20  # glibc gives pages of their own to tensors from 32 MiB on at the latest


def page_locked(memory: torch.Tensor) -> torch.Tensor:
    """Host memory, touched before, locked for fast copies: the same if it is large, which then must never be freed.

    torch's own allocator takes the next power of two of what is large. Small tensors share pages, which CUDA does not
    lock twice: these become a copy.
    """
    if memory.nbytes < OWN_PAGES_BYTES:
        return memory.pin_memory()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    return memory


class StreamedZero(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """DeepSpeed's optimizer of stages 1 and 2; between steps its fp32 tensors are on the host."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._compute_device: Any = None
        self._is_built = False
        super().__init__(*arguments, **named)
        self._is_built = True
        self.backend = torch.get_device_module(self.device)  # torch.cuda, or torch.cpu, whose streams do nothing
        self.down, self.up = self.backend.Stream(), self.backend.Stream()
        self.masters: list[torch.Tensor] = []  # during a step: where each group's master weights are meanwhile
        self.staged: list[list[torch.Tensor]] = []  # and the places on the GPU, for master and moments of a group each
        self.saved: list[Any] = []  # and when what was there has gone back up
        self.moments: list[dict[str, torch.Tensor]] = []
        locked = page_locked if self.backend is torch.cuda else torch.Tensor.detach
        for master in self.single_partition_of_fp32_groups:
            master.data = locked(master.data)
            self.moments.append({name: locked(torch.zeros_like(master.data)) for name in MOMENTS})
        self._take_moments()

    @property
    def device(self) -> Any:
        """Where gradients are; while DeepSpeed builds its fp32 tensors, where those belong."""
        return self._compute_device if self._is_built else "cpu"

    @device.setter
    def device(self, device: Any) -> None:
        self._compute_device = device

    def initialize_optimizer_states(self) -> None:
        """Not DeepSpeed's: its zero gradients of all groups would be the peak of the whole run."""

    def state_dict(self) -> Any:
        """DeepSpeed's, once the last step's copies have arrived."""
        self.backend.synchronize()
        return super().state_dict()

    def load_state_dict(self, *arguments: Any, **named: Any) -> None:
        """DeepSpeed's, into the memory that is locked already."""
        self.backend.synchronize()
        super().load_state_dict(*arguments, **named)
        for master, moments in zip(self.single_partition_of_fp32_groups, self.moments, strict=True):
            for name, memory in moments.items():
                memory.copy_(self.optimizer.state[master][name])
        self._take_moments()

    def scaled_global_norm(self, norm_type: int = 2) -> torch.Tensor:
        """DeepSpeed's, on the host: it looks at it for each group, and would wait behind a group on its way up."""
        norm: torch.Tensor = super().scaled_global_norm(norm_type)
        return norm.cpu()

    def step(self, closure: Any = None) -> None:
        """DeepSpeed's step, for which the fp32 tensors seem to be on the GPU: one number in their shape."""
        self.masters = [master.data for master in self.single_partition_of_fp32_groups]
        size, sets = max(map(len, self.masters)), min(STREAM_SETS, len(self.masters))
        self.down.wait_stream(self.up)
        self.staged = [list(torch.empty(3, size, device=self.device)) for _ in range(sets)]
        self.saved = [self.backend.current_stream().record_event()] * sets
        number = torch.empty(1, device=self.device)
        for master in self.single_partition_of_fp32_groups:
            master.data = number.expand(len(master))
        try:
            super().step(closure)
        finally:
            self._give_back((len(self.masters) - 1) % sets)
            for master, memory in zip(self.single_partition_of_fp32_groups, self.masters, strict=True):
                master.data = memory

    def _optimizer_step(self, group_no: int) -> None:
        """DeepSpeed's, of a group that is on the GPU meanwhile.

        The host enqueues all groups at once: a group comes down while the one before is stepped and the ones before
        that go back up.
        """
        master, moments = self.single_partition_of_fp32_groups[group_no], self.moments[group_no]
        host = [self.masters[group_no], *moments.values()]
        which = group_no % len(self.staged)
        here = [buffer[: len(host[0])] for buffer in self.staged[which]]
        self._copy(self.down, self.saved[which], here, host)
        self.backend.current_stream().wait_stream(self.down)
        master.data = here[0]
        state = self.optimizer.state[master]
        state.update(zip(MOMENTS, here[1:], strict=True))
        state["step"] = state["step"].to(self.device)
        super()._optimizer_step(group_no)
        state.update(moments)
        self.saved[which] = self._copy(self.up, self.backend.current_stream().record_event(), host, here)

    def _give_back(self, last: int) -> None:
        """Free the places on the GPU; the last group may still go up while the next forward pass begins."""
        for number, (places, saved) in enumerate(zip(self.staged, self.saved, strict=True)):
            if number == last and self.backend is torch.cuda:
                for place in places:
                    place.record_stream(self.up)
            else:
                self.backend.current_stream().wait_event(saved)
        self.staged = []

    def _copy(self, stream: Any, before: Any, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """On a stream, once `before` has happened; the event that it is done."""
        with self.backend.stream(stream):
            stream.wait_event(before)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def _take_moments(self) -> None:
        """Give torch's Adam its moments, so that it allocates none on the GPU; its step counts stay."""
        for master, moments in zip(self.single_partition_of_fp32_groups, self.moments, strict=True):
            state = self.optimizer.state[master]
            state.setdefault("step", torch.zeros((), device=self.device))
            state.update(moments)
        self._link_all_hp_params()
        self._hp_optimizer_states_linked = False  # DeepSpeed would link them in the first step, when they are elsewhere
        self._lazy_init_hp_params_optimizer_state()


class StreamedOnePassZero(StreamedZero, OnePassZero):
    """The same, with a group's step in one pass."""
