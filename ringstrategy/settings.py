"""Arguments that every rank must have been given alike, compared before anybody waits for what never comes."""

from __future__ import annotations

from collections.abc import Mapping

from ringstrategy.process_group import Rank, RankGroup

__all__ = ["SettingMismatch", "check_same_settings"]


class SettingMismatch(RuntimeError):
    """The ranks of a run were given different settings."""


def check_same_settings(group: RankGroup, settings: Mapping[str, object]) -> None:
    """Compare settings across ranks. Collective.

    Args:
        group: the ranks to compare.
        settings: by the name that the user knows; the same names on all ranks. Values that are neither numbers, text
            nor None are compared by how they print.

    Raises:
        SettingMismatch: on every rank, with each setting that differs, and the first rank where it does.
    """
    everyone = group.exchange({name: _plain(value) for name, value in settings.items()})
    differences = []
    for name, first in everyone[0].items():
        other = next((place for place, theirs in enumerate(everyone) if theirs.get(name) != first), None)
        if other is not None:
            differences.append(
                f"{name} is {first!r} on {_place(group.ranks[0])} and {everyone[other].get(name)!r} on "
                f"{_place(group.ranks[other])}"
            )
    if differences:
        raise SettingMismatch(
            f"The ranks were not given the same settings: {'; '.join(differences)}. Start every rank with the same "
            "script and arguments."
        )


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _place(rank: Rank) -> str:
    return f"rank {rank.rank} (host {rank.host.name})"
