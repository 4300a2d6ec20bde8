"""Plans as data: what to run, what it costs, and how far it can be from the best.

The JSON schema is generated from `PlanFile`. A reader refuses other versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xmem.errors import InvalidScheduleError, SchemaError
from xmem.planner.chain import Chain
from xmem.planner.schedule import Op, format_ops, parse_ops
from xmem.planner.simulation import play
from xmem.report.model import write_whole

if TYPE_CHECKING:
    from xmem.receipts import Receipt

PLAN_SCHEMA_VERSION = 3


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What a real step came to, beside what was predicted.

    Attributes:
        predicted_peak_bytes: the plan's peak when it was run.
        measured_peak_bytes: counted as the plan counts: the batch included, parameters and their
            gradients not.
        step_peak_bytes: the most allocated in the step, all included.
        plain_step_seconds: of a forward and backward without the plan, None where that was not run.
        planned_step_seconds: of the same with the plan.
        rounds: how many plans were run until one was within its budget.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    step_peak_bytes: int
    plain_step_seconds: float | None
    planned_step_seconds: float
    rounds: int

    @property
    def error(self) -> float:
        """By what share the measured peak exceeds the predicted one."""
        return self.measured_peak_bytes / self.predicted_peak_bytes - 1

    @property
    def measured_overhead(self) -> float | None:
        """What the plan cost in time, as a share of the plain step."""
        if not self.plain_step_seconds:
            return None
        return self.planned_step_seconds / self.plain_step_seconds - 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest schedule that was found for a budget.

    Attributes:
        chain_name: of the chain that was planned.
        budget_bytes: what it had to fit.
        ops: the schedule.
        seconds: how long it takes, loss excluded.
        peak_bytes: the most that it holds, the batch included.
        store_all_seconds: what a step takes that keeps everything, by the fastest options.
        bound_seconds: no schedule whatever that fits the budget is faster.
        gap: no schedule of the family is faster by more than this share of `store_all_seconds`;
            0.0: it is the optimum of the family.
        options: for each stage the name of the option by which its backward finds it.
        option_names: for each stage the names of all its options, which the numbers in `ops` mean;
            empty: each has one, which keeps all.
        stage_names: of the chain; by these a model's stages are found again.
        store_all_peak_bytes: what a step holds that keeps everything, as each stage's option 0.
        traced: the stages are those of a traced forward, not modules.
        verified: what a real step came to; None: none has been run.
    """

    chain_name: str
    budget_bytes: int
    ops: tuple[Op, ...]
    seconds: float
    peak_bytes: int
    store_all_seconds: float
    bound_seconds: float
    gap: float
    options: tuple[str, ...]
    stage_names: tuple[str, ...]
    store_all_peak_bytes: int
    traced: bool = False
    verified: Verified | None = None
    option_names: tuple[tuple[str, ...], ...] = ()

    def apply(
        self, model: Any, *, preserve_rng: bool = True, directory: str | Path | None = None
    ) -> Receipt:
        """Let a model run as the plan says, from its next forward pass on.

        Outside of gradient recording (`no_grad`) the model runs as it did. Recomputation sees the
        parameters, random numbers, precision and training flags of the first pass, and running
        statistics are updated once.

        Args:
            model: a native module of the active backend, with the stages that were planned.
            preserve_rng: recomputation draws the same random numbers.
            directory: where a scratch file holds what stages offload to disk; None:
                $XMEM_OFFLOAD_DIR, or the system's for temporary files.

        Returns:
            A receipt; `receipt.undo()` restores the model.

        Raises:
            UsageError: the model has other stages than the plan.
            CompositionError: a stage is checkpointed already, or cannot be recomputed.
            CapabilityError: the plan keeps a stage in a way that cannot be executed.
            OffloadError: the directory is missing or cannot be written to; in a step: the disk is
                full. Nothing is lost then, and from then on stages keep what does not fit.
        """
        from xmem.planned import apply_plan

        return apply_plan(self, model, preserve_rng=preserve_rng, directory=directory)

    @property
    def overhead(self) -> float:
        """What recomputing costs, as a share of `store_all_seconds`."""
        return self.seconds / self.store_all_seconds - 1 if self.store_all_seconds else 0.0

    def __str__(self) -> str:
        return format_ops(self.ops)

    def check(self, chain: Chain) -> None:
        """Play the plan on a chain and hold it to what it promises.

        Raises:
            InvalidScheduleError: it cannot be played, takes other seconds or bytes than it says,
                exceeds its budget, or leaves something behind.
        """
        world = play(chain, self.ops)
        promised = self.seconds, self.peak_bytes
        played = world.total_seconds, world.peak_bytes
        if promised != played:
            raise InvalidScheduleError(
                "the plan promises {} s and {} bytes at its peak".format(*promised)
                + f"; played on {chain.name!r} it has "
                + "{} s and {} bytes".format(*played)
            )
        if world.peak_bytes > self.budget_bytes:
            raise InvalidScheduleError(
                f"the plan holds {world.peak_bytes} bytes at its peak, more than its budget of"
                f" {self.budget_bytes}"
            )
        if world.held():
            raise InvalidScheduleError(f"the plan never drops {', '.join(world.held())}")

    def to_json(self) -> bytes:
        """Return the plan as JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        file = PlanFile(**{**fields, "ops": format_ops(self.ops)})
        return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"

    @classmethod
    def from_json(cls, content: bytes | str) -> Plan:
        """Read a plan.

        Raises:
            SchemaError: it is none, or of another version.
        """
        try:
            raw = msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise SchemaError(f"this is not JSON: {error}") from error
        version = raw.get("plan_schema_version") if isinstance(raw, dict) else None
        if version != PLAN_SCHEMA_VERSION:
            raise SchemaError(
                f"this has plan schema version {version!r}; this xmem reads {PLAN_SCHEMA_VERSION}."
                " Plan again, or read it with the xmem that wrote it."
            )
        try:
            fields = msgspec.structs.asdict(msgspec.convert(raw, PlanFile))
            del fields["plan_schema_version"]
            return cls(**{**fields, "ops": parse_ops(fields["ops"])})
        except (msgspec.ValidationError, InvalidScheduleError) as error:
            raise SchemaError(f"this is no plan: {error}") from error

    def write(self, path: str | Path) -> None:
        """Write the plan to a file, in one step."""
        write_whole(self.to_json(), Path(path))

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan from a file; see `from_json`."""
        return cls.from_json(Path(path).read_bytes())


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as it is written; `ops` in the notation of `xmem.planner.schedule`."""

    chain_name: str
    budget_bytes: int
    ops: str
    seconds: float
    peak_bytes: int
    store_all_seconds: float
    bound_seconds: float
    gap: float
    options: tuple[str, ...]
    option_names: tuple[tuple[str, ...], ...]
    stage_names: tuple[str, ...]
    store_all_peak_bytes: int
    traced: bool
    verified: Verified | None
    plan_schema_version: int = PLAN_SCHEMA_VERSION


def plan_schema() -> dict[str, Any]:
    """Return the JSON schema of a plan."""
    generated = msgspec.json.schema(PlanFile)
    generated["$id"] = f"https://xmem-train.example/schema/plan-{PLAN_SCHEMA_VERSION}.json"
    return generated
