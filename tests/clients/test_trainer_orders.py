"""One Trainer whose calls come in any order: evaluate, predict, train, resume, save, the best model at the end.

`train()` begins with accelerate's `free_memory()`, which destroys the engine that the Trainer goes on with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from client_configs import DEVICES, zero_config
from comparing import EPSILON

LIVED = "trainer_order_cases:lived"
LETTERS = ("evaluate", "predict", "train", "best", "resume", "save")
PLACES = [(0, "none"), *itertools.product((2, 3), DEVICES)]
WORDS_AT_ONCE = 8
"""One process does so many."""
Report = dict[str, Any]
Plain = Callable[..., Any]
Word = tuple[str, ...]


def words(stage: int) -> list[Word]:
    """All words of three calls that the clients allow; the calls of shorter words are their beginnings.

    transformers evaluates without a training at stage 3 only, and saves no model that no engine has.
    """
    return [word for word in itertools.product(LETTERS, repeat=3) if is_allowed(word, stage)]


def is_allowed(word: Word, stage: int) -> bool:
    trained = served = False
    for letter in word:
        trains = letter in ("train", "best", "resume")
        if (letter == "resume" and not trained) or (letter == "save" and not served):
            return False
        if not (trains or trained or stage == 3):
            return False
        trained, served = trained or trains, True
    return True


def covering(stage: int) -> list[Word]:
    """Few words with every beginning and every pair of neighbours that `words` has."""
    chosen: list[Word] = []
    missing = {part for word in words(stage) for part in parts(word)}
    while missing:
        best = max(words(stage), key=lambda word: len(missing & parts(word)))
        chosen.append(best)
        missing -= parts(best)
    return chosen


def parts(word: Word) -> set[Word]:
    return {("", word[0]), *itertools.pairwise(word)}


def check(
    clients: Any, plain: Plain, nvme_path: Path, place: tuple[int, str], chosen: Sequence[Word], **more: Any
) -> None:
    stage, device = place
    config = zero_config(stage, device, nvme_path, threshold=0 if stage == 3 else None)
    for first in range(0, len(chosen), WORDS_AT_ONCE):
        some = chosen[first : first + WORDS_AT_ONCE]
        ours, theirs = clients.run(LIVED, config, some, **more), plain(LIVED, words=some, **more)
        for word, mine, other in zip(some, ours, theirs, strict=True):
            compare(word, mine, other)


def compare(word: Word, ours: Sequence[Report], theirs: Sequence[Report]) -> None:
    for letter, report, expected in zip(word, ours, theirs, strict=True):
        near = {key: pytest.approx(value, rel=64 * EPSILON) for key, value in expected.items()}
        assert report == near, f"{letter} of {' '.join(word)}"


def test_a_trainer_trains_after_an_evaluation_and_again(clients: Any, plain: Plain, nvme_path: Path) -> None:
    check(clients, plain, nvme_path, (3, "nvme"), [("evaluate", "train", "train")])


@pytest.mark.broad
@pytest.mark.parametrize("place", [(0, "none"), (2, "cpu"), (3, "nvme")])
def test_each_call_follows_each_other_as_with_the_plain_trainer(
    clients: Any, plain: Plain, nvme_path: Path, place: tuple[int, str]
) -> None:
    check(clients, plain, nvme_path, place, covering(place[0]))


@pytest.mark.slow
@pytest.mark.parametrize("first", LETTERS[:4])
@pytest.mark.parametrize("place", PLACES)
def test_every_order_of_three_calls_is_as_with_the_plain_trainer(
    clients: Any, plain: Plain, nvme_path: Path, place: tuple[int, str], first: str
) -> None:
    chosen = [word for word in words(place[0]) if word[0] == first]
    check(clients, plain, nvme_path, place, chosen)


@pytest.mark.broad
@pytest.mark.parametrize("place", [(2, "cpu"), (3, "cpu"), (3, "nvme")])
def test_two_ranks_live_as_one_plain_trainer_with_their_batches(
    clients: Any, plain: Plain, nvme_path: Path, place: tuple[int, str]
) -> None:
    word = ("train", "evaluate", "train", "best", "save", "resume", "predict")
    config = zero_config(place[0], place[1], nvme_path, threshold=0 if place[0] == 3 else None)
    case = "trainer_order_cases:lived_on_ranks"
    for ours in clients.run_ranks(2, case, config, [word], gradient_accumulation_steps=1):
        compare(word, ours[0], plain(LIVED, words=[word], dropout=0.0)[0])


@pytest.mark.broad
@pytest.mark.parametrize("place", [(2, "cpu"), (3, "none"), (3, "nvme")])
def test_nothing_is_left_of_the_engines_before(clients: Any, nvme_path: Path, place: tuple[int, str]) -> None:
    stage, device = place
    config = zero_config(stage, device, nvme_path, threshold=0 if stage == 3 else None)
    found = clients.run("trainer_order_cases:rounds", config, 5)
    assert found[-1]["engines"] == 1
    assert found[-1] == found[1], found
