"""A worker: computes a gradient, pushes a slice of it to each server, and continues with the parameters that servers return."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from shardlab.matrix.cell import Cell
from trainers import model_options
from trainers.checkpointing.state_parts import TensorPart
from trainers.parameter_server import protocol
from trainers.parameter_server.ledger import ServerMode
from trainers.parameter_server.protocol import RequestKind, ServerLink
from trainers.replicated import ReplicatedEngine
from trainers.theory.term import ModelPart, Term
from trainers.theory.whole_models import list_worker_terms, make_pull_term

if TYPE_CHECKING:
    from trainers.checkpointing.state_parts import State
    from trainers.ranks.ranks import Peers, Ranks
    from trainers.task import Task


class WorkerEngine(ReplicatedEngine):
    """The engine of a worker. The model's parameters are views of one vector, its gradients views of another vector. Every
    server has a slice of these vectors.

    `update` pushes gradients and pulls parameters. Its time includes waiting for servers and, if the mode says so, for other
    workers. The optimizer only contains the learning rate, which each push sends to the servers; it makes no step and has no
    state.
    """

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, model: nn.Module, mode: ServerMode) -> None:
        super().__init__(cell, task, ranks, model)
        self.data_ranks = cell.gpus
        self._mode, self._step_count = mode, 0
        self._flatten_parameters()
        self._servers = range(cell.gpus, cell.world_size)
        self._slice_by_server = dict(zip(self._servers, protocol.list_server_slices(self._parameters.numel(), cell.servers)))
        self._version_by_server = dict.fromkeys(self._servers, 0.0)  # server -> version of its parameters that this worker has
        self._link = ServerLink(ranks, worker_count=cell.gpus if mode.waits else 0)
        self._workers = self._link.workers
        self._has_momentum = ranks.rank == 0 and cell.optimizer.momentum > 0  # whether this worker saves and restores momentum
        self._momentum_buffer: torch.Tensor | None = None  # memory for the servers' momentum while a checkpoint is loaded

    def _flatten_parameters(self) -> None:
        """Make parameters and gradients views of one vector each, so that slices are sent without a copy."""
        trained_parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._parameters = parameters_to_vector(p.detach() for p in trained_parameters)
        self._gradients = torch.zeros_like(self._parameters)
        sizes = [parameter.numel() for parameter in trained_parameters]
        views = zip(trained_parameters, torch.split(self._parameters, sizes), torch.split(self._gradients, sizes))
        for parameter, weights, gradient in views:
            parameter.data = weights.view_as(parameter)
            parameter.grad = gradient.view_as(parameter)
        # Pulled parameters are received into this tensor. On a CPU it is the vector of parameters itself.
        on_gpu = self.device.type == "cuda"
        self._receive_buffer = torch.empty_like(self._parameters, device="cpu", pin_memory=True) if on_gpu else self._parameters
        # On a GPU, gradients are first copied into this tensor: copies into pinned memory are faster than into new memory.
        self._gradient_buffer = torch.empty_like(self._gradients, device="cpu", pin_memory=True) if on_gpu else self._gradients

    def one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def sum_overflow(self, overflowed: torch.Tensor) -> torch.Tensor:
        host_flag = overflowed.cpu()  # copied to the CPU, because the group of workers uses gloo
        if self._workers is not None:
            dist.all_reduce(host_flag, group=self._workers)
        return host_flag  # if servers do not wait for all workers, each worker has its own loss scale and skips steps alone

    def update(self) -> None:
        if not self.may_step():  # a skipped step is not pushed, so the servers do not count it
            self._gradients.zero_()
            return
        self._step_count += 1
        must_pull = self._step_count % self._mode.pull_interval == 0
        learning_rate = self.optimizer.param_groups[0]["lr"]
        gradients = self._copy_to_host(self._gradients)
        for server, server_slice in self._slice_by_server.items():
            header = (RequestKind.PUSH, self._version_by_server[server], learning_rate, float(must_pull))
            self._link.send(server, header, gradients[server_slice])
        self._await_parameters(must_pull=must_pull)
        self._gradients.zero_()

    def _copy_to_host(self, gradients: torch.Tensor) -> torch.Tensor:
        """Copy the gradients to host memory. The next call overwrites the result."""
        if self._gradient_buffer is gradients:
            return gradients
        return self._gradient_buffer.copy_(gradients)

    def _await_parameters(self, *, must_pull: bool) -> None:
        """Wait for the servers' answers to a push or a pull. must_pull: whether new parameters come with the answers."""
        for server, server_slice in self._slice_by_server.items():
            version = self._link.receive_header(server)[0]
            if must_pull:
                self._link.receive(server, self._receive_buffer[server_slice])
                self._version_by_server[server] = version
        if must_pull and self._receive_buffer is not self._parameters:
            self._parameters.copy_(self._receive_buffer)

    def make_state_parts(self) -> State:
        """As `Checkpointable.make_state_parts`. Every worker has the parameters. The first worker also has the momentum, which
        it requests from the servers."""
        parts = super().make_state_parts()
        if self._has_momentum:
            momentum = self._request_momentum() if self._momentum_buffer is None else self._momentum_buffer
            trained = [(model_options.plain_name(name), p) for name, p in self.model.named_parameters() if p.requires_grad]
            pieces = torch.split(momentum, [p.numel() for _, p in trained])
            part_by_name = {name: TensorPart.from_tensor(flat.view(p.shape)) for (name, p), flat in zip(trained, pieces)}
            parts |= {f"optimizer/momentum_buffer/{name}": part for name, part in part_by_name.items()}
        return parts

    def _request_momentum(self) -> torch.Tensor:
        momentum = torch.zeros_like(self._parameters, device="cpu")
        for server, server_slice in self._slice_by_server.items():
            self._link.send(server, (RequestKind.SAVE,))
            if self._link.receive_header(server)[0]:
                self._link.receive(server, momentum[server_slice])
        return momentum

    def collect_numbers(self) -> dict[str, float]:
        return {**super().collect_numbers(), "updates": float(self._step_count)}

    def allocate_optimizer_state(self, numbers: dict[str, float]) -> None:
        self._momentum_buffer = torch.zeros_like(self._parameters, device="cpu")

    def finish_loading(self, numbers: dict[str, float]) -> None:
        """As `Checkpointable.finish_loading`. Every worker has loaded its parameters from the checkpoint; the first worker
        sends each server its share of the state."""
        super().finish_loading(numbers)
        update_count = numbers.get("updates", 0.0)  # absent if another strategy saved the checkpoint
        self._step_count, self._version_by_server = int(update_count), dict.fromkeys(self._servers, update_count)
        assert self._momentum_buffer is not None
        if self.data_rank == 0:
            parameters = self._parameters.cpu()
            for server, part in self._slice_by_server.items():
                share = torch.cat([parameters[part], self._momentum_buffer[part]]) if self._has_momentum else parameters[part]
                self._link.send(server, (RequestKind.RESTORE, update_count, float(self._has_momentum)), share)
                self._link.receive_header(server)
        self._momentum_buffer = None

    def gradient_norm(self) -> float:
        """The norm of the mean gradient of all workers, if the servers wait for all workers; else of this worker's gradient."""
        mean_gradient = self._gradients.cpu().clone()
        if self._workers is not None:
            dist.all_reduce(mean_gradient, group=self._workers)
            mean_gradient /= self.data_ranks
        # fp32 would lose digits in one sum over all elements
        return float(torch.linalg.vector_norm(mean_gradient, dtype=torch.float64))

    def refresh_parameters(self) -> None:
        if not self._mode.waits:  # other workers, and with an interval this worker, may have pushed since the last pull
            for server in self._servers:
                self._link.send(server, (RequestKind.PULL,))
            self._await_parameters(must_pull=True)

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        self.refresh_parameters()
        return model_options.gather_whole_parameters(self.model)

    def theory(self) -> list[Term]:
        return list_worker_terms(self.cell, ModelPart(elements=self._gradients.numel()), waits=self._mode.waits)

    def compute_textbook_bytes(self) -> float:
        return 2.0 * self._count_parameter_bytes()  # psi for pushed gradients, psi for pulled parameters

    def count_total_sent_bytes(self) -> dict[str, float] | None:
        """As `Accountable.count_total_sent_bytes`. Workers push and pull in every run: the server counts instead of a proof."""
        counts, parameter_bytes = self._request_counts(), self._count_parameter_bytes()
        push_count = sum(counts["pushes_by_worker"])
        gradient_bytes = self.cell.gpus * sum(term.sent_bytes for term in self.theory())
        theory_bytes = gradient_bytes + make_pull_term(self.cell, parameter_bytes).sent_bytes
        if not push_count:
            return {"theory": theory_bytes}
        steps_per_worker = push_count / self.cell.gpus
        return {"theory": theory_bytes, "counted": parameter_bytes * (push_count + counts["pulls"]) / steps_per_worker}

    def _request_counts(self) -> dict[str, Any]:
        self._link.send(self._servers[0], (RequestKind.ASK,))
        return self._receive_counts(self._servers[0])

    def _count_parameter_bytes(self) -> float:
        return float(self._gradients.numel() * self._gradients.element_size())

    def effective(self) -> dict[str, Any]:
        for server in self._servers:
            self._link.send(server, (RequestKind.ASK,))
        counts_by_server = [self._receive_counts(server) for server in self._servers]
        # Each server counts for itself; most counts in the result are those of the first server. They include warm-up steps.
        return {
            **super().effective(),
            **{name: value for name, value in counts_by_server[0].items() if name != "elements"},
            "server_elements": [counts["elements"] for counts in counts_by_server],
            "largest_staleness": max(int(staleness) for counts in counts_by_server for staleness in counts["staleness_counts"]),
            "largest_lead_steps": max(counts["largest_lead_steps"] for counts in counts_by_server),
            "backend": "gloo, point to point",
        }

    def _receive_counts(self, server: int) -> dict[str, Any]:
        counts_json = self._link.receive(server, torch.empty(int(self._link.receive_header(server)[0]), dtype=torch.uint8))
        counts: dict[str, Any] = msgspec.json.decode(bytes(counts_json.tolist()))
        return counts

    def select_training_peers(self, ranks: Ranks) -> Peers:
        return ServerPeers(self._link, self._servers[0], self.device)

    def close(self) -> None:
        for server in self._servers:
            self._link.send(server, (RequestKind.BYE,))
            self._link.flush(server)


class ServerPeers:
    """Collectives of the workers through the first server. Collectives of torch are not used, because they would fail if a
    worker is lost."""

    def __init__(self, link: ServerLink, server: int, device: torch.device) -> None:
        self._link, self._server, self._device = link, server, device

    def all_gather_numbers(self, numbers: Sequence[float]) -> np.ndarray:
        """Gather the numbers of all workers that have not ended. Every worker passes n numbers. Returns an array (workers, n)
        in float64, in the order of ranks."""
        sent_numbers = torch.tensor(numbers, dtype=torch.float64)
        self._link.send(self._server, (RequestKind.MEET, len(sent_numbers)), sent_numbers if len(sent_numbers) else None)
        gathered_numbers = torch.empty(int(self._link.receive_header(self._server)[0]), len(sent_numbers), dtype=torch.float64)
        return (self._link.receive(self._server, gathered_numbers) if gathered_numbers.numel() else gathered_numbers).numpy()

    def barrier(self) -> None:
        """Wait until every worker that has not ended has called `barrier` and its device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.all_gather_numbers([])
