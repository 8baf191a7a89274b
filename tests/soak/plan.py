"""What a soak test does to a run: which run, and at which moments which of its ranks die. Pure, drawn by seed."""

import random
from dataclasses import dataclass, field, replace
from typing import Literal

Model = Literal["tiny", "language"]

STEPS, EVAL_EVERY_STEPS, ACCUMULATION, KEEP_LAST = 12, 3, 2, 2
VALIDATION_BATCHES = 4
"Micro-batches of one pass over all ranks."

SAVE_PLACES = ("file", "before_rename", "after_rename", "manifest", "published")
"In the middle of a file; all files written; renamed without a manifest; in the middle of it; complete, not pruned."
PLACES = {
    "forward": ("last_block",),
    "between_micro_batches": ("second",),
    "evaluation": ("last_block",),
    "synchronous_save": SAVE_PLACES,
    "asynchronous_save": (*SAVE_PLACES, "in_flight"),
    "prune": ("marker", "half"),
    "after_resume": ("built", "restored", "cleaning", "first_fetch", "first_forward", "soon"),
}
POINTS = (*PLACES, "twice_in_a_row")
MAIN_ONLY = {"before_rename", "after_rename", "manifest", "published", "marker", "half", "cleaning"}
"Places that rank 0 alone comes to."


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A tiny training of STEPS steps."""

    num_processes: int
    zero_stage: Literal[0, 1, 2, 3] = 1
    sequence_degree: int = 1
    model: Model = "tiny"
    save_every_steps: int = 2
    asynchronous: bool = False

    @property
    def num_saves(self) -> int:
        return STEPS // self.save_every_steps

    def describe(self) -> str:
        """What decides the run's numbers, as a folder's name: not when and how it saves."""
        return f"{self.model}_p{self.num_processes}_z{self.zero_stage}_s{self.sequence_degree}"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One death by SIGKILL."""

    point: str
    "A key of PLACES."
    place: str
    "One of its places."
    occurrence: int = 1
    "The how-manieth time the process comes there, from its start on."
    who: int | None = None
    "The rank that dies; None for all at the moment when the first comes there."
    agent: bool = False
    "Whether the others are sent SIGTERM at once, as torchrun's agent does; otherwise nobody tells them."
    delay_s: float = 0.0
    "For the place `soon`: seconds after the model was built."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run and its deaths, one a start; the start after the last goes on to the end."""

    seed: int
    point: str
    "One of POINTS."
    setting: Setting
    kills: tuple[Kill, ...] = field(default_factory=tuple)


def draw_kill(seed: int) -> Plan:
    """The plan of a seed; POINTS take turns, so that as many seeds in a row as there are points hold each once."""
    generator = random.Random(seed)
    point = POINTS[seed % len(POINTS)]
    setting = _draw_setting(generator, point)
    return Plan(seed=seed, point=point, setting=setting, kills=_draw_kills(generator, point, setting))


def _draw_setting(generator: random.Random, point: str) -> Setting:
    num_processes = generator.choices((1, 2, 4), weights=(3, 6, 2))[0]
    model: Model = generator.choices(("tiny", "language"), weights=(4, 1))[0]  # pyright: ignore[reportAssignmentType]
    may_be_cut = model == "language" and num_processes > 1
    is_asynchronous = generator.random() < 0.4
    return Setting(
        num_processes=num_processes,
        zero_stage=generator.choices((1, 2, 3), weights=(4, 1, 1))[0],  # pyright: ignore[reportArgumentType]
        sequence_degree=generator.choice((1, 2)) if may_be_cut else 1,
        model=model,
        save_every_steps=generator.choice((2, 3)),
        asynchronous=point == "asynchronous_save" or (point != "synchronous_save" and is_asynchronous),
    )


def _draw_kills(generator: random.Random, point: str, setting: Setting) -> tuple[Kill, ...]:
    if point == "after_resume":
        place = generator.choice(PLACES[point])
        return _draw_former(generator, place, setting), _draw(generator, point, place, setting)
    if point == "twice_in_a_row":
        choices = [name for name in POINTS if name in PLACES and name != "after_resume"]
        choices.remove("synchronous_save" if setting.asynchronous else "asynchronous_save")
        drawn = [generator.choice(choices) for _ in range(2)]
        return tuple(_draw(generator, name, generator.choice(PLACES[name]), setting, early=True) for name in drawn)
    return (_draw(generator, point, generator.choice(PLACES[point]), setting),)


def _draw_former(generator: random.Random, place: str, setting: Setting) -> Kill:
    """A death that leaves a checkpoint to resume from and, for `cleaning`, a part of the next one."""
    if place == "cleaning":
        return replace(_draw(generator, "synchronous_save", "before_rename", setting), occurrence=2)
    # The second save may still be on its way to the disk; the first is published once the second begins.
    forwards = 2 * setting.save_every_steps * ACCUMULATION
    return replace(_draw(generator, "forward", "last_block", setting), occurrence=forwards + generator.randint(1, 2))


def _draw(generator: random.Random, point: str, place: str, setting: Setting, *, early: bool = False) -> Kill:
    """An early death comes in the first half of a run, and in the first steps of a resumed one."""
    most = count_occurrences(point, place, setting)
    victims = (0,) if place in MAIN_ONLY else tuple(range(setting.num_processes))
    return Kill(
        point=point,
        place=place,
        occurrence=generator.randint(1, max(1, min(most, 2) if early else most)),
        who=None if setting.num_processes == 1 else generator.choice((None, generator.choice(victims))),
        agent=generator.random() < 0.3,
        delay_s=round(generator.uniform(0.0, 0.5), 3) if place == "soon" else 0.0,
    )


def count_occurrences(point: str, place: str, setting: Setting) -> int:
    """How often at least each process comes to a place in a run of STEPS steps."""
    if point == "after_resume":
        return 1
    if place == "in_flight":
        return setting.num_saves - 1
    return {
        "forward": STEPS * ACCUMULATION,
        "between_micro_batches": STEPS,
        "evaluation": STEPS // EVAL_EVERY_STEPS * VALIDATION_BATCHES // setting.num_processes,
        "synchronous_save": setting.num_saves,
        "asynchronous_save": setting.num_saves,
        "prune": setting.num_saves - KEEP_LAST,
    }[point]
