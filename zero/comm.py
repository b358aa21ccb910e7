"""Placeholder."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ticket:
    number: int


class Comm: ...
