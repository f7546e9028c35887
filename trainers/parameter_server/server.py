"""A parameter server. One thread per worker receives requests and one loop answers them, so that a slow or lost worker does not
delay other workers."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.nn.utils import parameters_to_vector

from trainers.communication import bytes_of
from trainers.dtypes import dtype_name, weight_dtype
from trainers.engine import Server
from trainers.model import optimization
from trainers.parameter_server import protocol
from trainers.parameter_server.ledger import Ledger, ServerMode
from trainers.parameter_server.protocol import RequestKind, ServerLink
from trainers.ranks import hang_dump
from trainers.theory.term import Term
from trainers.theory.whole_models import make_pull_term

if TYPE_CHECKING:
    from shardlab.matrix.cell import Cell
    from trainers.ranks.ranks import Ranks
    from trainers.task import Task


class Request(msgspec.Struct, frozen=True):
    """A request of a worker that a thread received."""

    worker: int
    kind: RequestKind
    a: float = 0.0
    """As in `RequestKind`."""
    b: float = 0.0
    """As in `RequestKind`."""
    c: float = 0.0
    """As in `RequestKind`."""
    payload: torch.Tensor | None = None
    """A buffer, which the thread reuses after the answer."""


class ParameterServer(Server):
    """Stores its share of the parameters on the CPU and updates it with SGD, by the rules of its mode.

    It needs memory of the size of the share for each of parameters, gradient and momentum, and for the requests and replies of
    each worker.
    """

    def __init__(self, cell: Cell, task: Task, ranks: Ranks, mode: ServerMode) -> None:
        """Initialize the share of the parameters from the cell's seed. Workers do the same, so no weights are sent."""
        self._link = ServerLink(ranks, worker_count=cell.gpus if mode.waits else 0)
        model = task.model().to(weight_dtype(cell.precision))
        all_parameters = parameters_to_vector(p.detach() for p in model.parameters() if p.requires_grad)
        self._cell, self._rank = cell, ranks.rank
        server_slice = protocol.list_server_slices(all_parameters.numel(), cell.servers)[ranks.rank - cell.gpus]
        self._parameters = torch.nn.Parameter(all_parameters[server_slice].clone())
        self._parameters.grad = torch.zeros_like(self._parameters)
        self._optimizer = optimization.make_optimizer(cell.optimizer, [self._parameters])
        self._ledger = Ledger(cell.gpus, mode)
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._queued_pushes: dict[int, Request] = {}  # by worker: wait for the pushes of all workers, if the mode says so
        self._unanswered_pushes: dict[int, Request] = {}  # by worker: are applied, but not answered yet
        self._meet_numbers: dict[int, torch.Tensor] = {}

    def serve(self) -> None:
        listener_threads = [
            threading.Thread(target=self._serve_worker, args=(worker,), daemon=True) for worker in range(self._cell.gpus)
        ]
        for listener_thread in listener_threads:
            listener_thread.start()
        while self._ledger.present_workers:
            self._handle_request(self._requests.get())
            self._release_workers()
        for listener_thread in listener_threads:
            listener_thread.join()

    def theory(self) -> list[Term]:
        return [make_pull_term(self._cell, float(bytes_of([self._parameters])))]

    def _serve_worker(self, worker: int) -> None:
        """Receive the requests of a worker until the worker leaves or is lost. Runs in its own thread."""
        gradient_buffer = torch.empty_like(self._parameters, requires_grad=False)
        try:
            while True:
                kind_code, a, b, c = self._link.receive_header(worker)
                kind, payload = RequestKind(int(kind_code)), None
                if kind is RequestKind.PUSH:
                    payload = self._link.receive(worker, gradient_buffer)
                elif kind is RequestKind.RESTORE:
                    payload = self._link.receive(worker, torch.empty((2 if b else 1) * len(gradient_buffer)))
                elif kind is RequestKind.MEET and a:
                    payload = self._link.receive(worker, torch.empty(int(a), dtype=torch.float64))
                self._requests.put(Request(worker, kind, a, b, c, payload))
                if kind is RequestKind.BYE:
                    return
        except RuntimeError as error:  # the connection was closed, or no message came before gloo's timeout
            print(f"worker {worker} is lost: {error}", flush=True)  # printed to this rank's log
            self._requests.put(Request(worker, RequestKind.LOST))

    def _handle_request(self, request: Request) -> None:
        hang_dump.report_progress()
        worker = request.worker
        if request.kind is RequestKind.PUSH:
            self._apply_push(request)
        elif request.kind is RequestKind.PULL:
            self._send_parameters(request, with_parameters=True)
        elif request.kind is RequestKind.SAVE:
            momentum = self._optimizer.state[self._parameters].get("momentum_buffer")
            self._send_reply(worker, (float(momentum is not None),), momentum)
        elif request.kind is RequestKind.RESTORE:
            self._restore_state(request)
        elif request.kind is RequestKind.ASK:
            self._send_text(worker, msgspec.json.encode(self._collect_counts()))
        elif request.kind is RequestKind.MEET:
            self._meet_numbers[worker] = self._read_meet_numbers(request)
            self._answer_meets()
        else:
            is_lost = request.kind is RequestKind.LOST
            self._ledger.record_leave(worker, is_lost=is_lost)
            self._unanswered_pushes.pop(worker, None)
            if is_lost and self._ledger.mode.waits:
                raise RuntimeError(f"worker {worker} is lost, and every update needs the gradients of all workers")
            self._answer_meets()

    def _apply_push(self, request: Request) -> None:
        """Apply the gradient of a push: at once, or, if the mode says so, when the gradients of all workers have arrived."""
        if not self._ledger.mode.waits:
            self._apply_pushes([request])
            self._unanswered_pushes[request.worker] = request
            return
        self._queued_pushes[request.worker] = request
        if self._queued_pushes.keys() == self._ledger.present_workers:
            # a fixed order: rounding repeats
            self._apply_pushes([self._queued_pushes[worker] for worker in sorted(self._queued_pushes)])
            self._unanswered_pushes, self._queued_pushes = self._queued_pushes, {}

    def _apply_pushes(self, pushes: list[Request]) -> None:
        """Make one update with the mean of the pushed gradients, each with its weight from the ledger."""
        mean_gradient = self._parameters.grad
        assert mean_gradient is not None
        mean_gradient.zero_()
        with torch.no_grad():
            for push in pushes:
                assert push.payload is not None
                mean_gradient.add_(push.payload, alpha=self._ledger.record_push(push.worker, int(push.a)) / len(pushes))
        optimization.set_learning_rate(self._optimizer, pushes[-1].b)
        self._optimizer.step()
        self._ledger.update_count += 1

    def _restore_state(self, request: Request) -> None:
        """Load the state from a RESTORE request. Checkpoints exist only for servers that wait for all workers, so each update
        before the checkpoint was one step of every worker."""
        assert request.payload is not None
        parameters, *momentum = torch.split(request.payload, self._parameters.numel())
        with torch.no_grad():
            self._parameters.copy_(parameters)
        for momentum_buffer in momentum:
            self._optimizer.state[self._parameters]["momentum_buffer"] = momentum_buffer
        self._ledger.resume_at(int(request.a))
        self._send_reply(request.worker, (), None)

    def _release_workers(self) -> None:
        """Send the parameters to each worker that waits after its push and may now begin its next step."""
        for worker in [worker for worker in self._unanswered_pushes if self._ledger.may_begin(worker)]:
            self._ledger.record_begin(worker)
            push = self._unanswered_pushes.pop(worker)
            self._ledger.pull_count += push.c == 1
            self._send_parameters(push, with_parameters=push.c == 1)

    def _answer_meets(self) -> None:
        """Answer all MEET requests if every worker that is left has sent MEET. The numbers of a worker that was lost after its
        MEET are in the answer too."""
        if not self._meet_numbers or not self._meet_numbers.keys() >= self._ledger.present_workers:
            return
        numbers_of_workers = torch.stack([self._meet_numbers[worker] for worker in sorted(self._meet_numbers)])
        for worker in self._meet_numbers.keys() & self._ledger.present_workers:
            self._send_reply(worker, (len(numbers_of_workers),), numbers_of_workers if numbers_of_workers.numel() else None)
        self._meet_numbers = {}

    def _read_meet_numbers(self, request: Request) -> torch.Tensor:
        return torch.empty(0, dtype=torch.float64) if request.payload is None else request.payload

    def _send_parameters(self, request: Request, *, with_parameters: bool) -> None:
        # A copy is sent, because the next update must not change a message that is still being sent.
        parameters = self._parameters.detach().clone() if with_parameters else None
        self._send_reply(request.worker, (self._ledger.update_count,), parameters)

    def _send_text(self, worker: int, text_bytes: bytes) -> None:
        self._send_reply(worker, (len(text_bytes),), torch.frombuffer(bytearray(text_bytes), dtype=torch.uint8))

    def _send_reply(self, worker: int, header: tuple[float, ...], payload: torch.Tensor | None) -> None:
        with contextlib.suppress(RuntimeError):  # the worker is lost; the thread that listens to it reports this
            self._link.send(worker, header, payload)

    def _collect_counts(self) -> dict[str, Any]:
        parameter_group = self._optimizer.param_groups[0]
        state_dtypes = {
            dtype_name(value.dtype)
            for entry in self._optimizer.state.values()
            for value in entry.values()
            if value is not None and value.dim() > 0
        }
        ledger = self._ledger
        return {
            "optimizer": type(self._optimizer).__name__,
            "momentum": parameter_group["momentum"],
            "weight_decay": parameter_group["weight_decay"],
            "last_lr": parameter_group["lr"],
            "optimizer_state_dtype": ", ".join(sorted(state_dtypes)) or None,
            "elements": self._parameters.numel(),
            "updates": ledger.update_count,
            "pushes_by_worker": ledger.steps_by_worker,
            "pulls": ledger.pull_count,
            "staleness_counts": dict(sorted(ledger.pushes_by_staleness.items())),
            "largest_lead_steps": ledger.largest_lead,
            "workers_lost": sorted(ledger.lost_workers),
            "waits_for_all_workers": ledger.mode.waits,
            "staleness_bound": ledger.mode.staleness_bound,
            "staleness_weighted": ledger.mode.staleness_weighted,
            "pull_interval": ledger.mode.pull_interval,
        }
