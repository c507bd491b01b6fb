"""The rule that excuses a differing token on hardware that rounds in another order."""

from __future__ import annotations

import math

import pytest
import torch
from engine_process import Output, Request, Result, Run
from margins import Place, Scores, gap, places, scores_of, scoring, verdict

GREEDY = {"temperature": 0.0}
FULL = {"temperature": 1.0, "seed": 3}


def without_noise(seed: int, position: int) -> torch.Tensor:
    return torch.zeros(4)


def place(params: dict[str, float], plain: int = 0, other: int = 1) -> Place:
    return Place(Request([5, 6], params), [5, 6, 7], plain, other)


def of(scores: torch.Tensor, plain: int = 0, other: int = 1) -> Scores:
    return Scores(float(scores[plain]), float(scores[other]), scores.sort().values)


def output(tokens: list[int]) -> Output:
    return Output([5, 6], [tokens], [""], ["length"], [], [], 0)


def result(*answers: list[int]) -> Result:
    return Result([output(tokens) for tokens in answers], {}, [], [], [], "")


def test_a_greedy_gap_is_that_of_the_two_logits_whichever_is_ahead() -> None:
    scores = torch.tensor([2.0, 1.75, 0.0, 0.0]).log_softmax(0)
    assert gap(place(GREEDY), of(scores), without_noise) == pytest.approx(0.25)
    assert gap(place(GREEDY, 1, 0), of(scores, 1, 0), without_noise) == pytest.approx(0.25)


def test_noise_belongs_to_the_scores_at_a_temperature_in_units_of_logits() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, 0.0]).log_softmax(0)
    noise = torch.tensor([0.0, 3.0, 0.0, 0.0])
    asked = []

    def drawn(seed: int, position: int) -> torch.Tensor:
        asked.append((seed, position))
        return noise

    found = gap(place({"temperature": 0.5, "seed": 3}), of(scores), drawn)
    assert found == pytest.approx(abs(2.0 - (1.0 + 0.5 * 3.0)))
    assert asked == [(3, 2)]  # position of the context's last token


def test_a_token_at_the_edge_of_the_nucleus_is_near_though_its_noise_is_far_ahead() -> None:
    chances = torch.tensor([0.6, 0.3, 0.06, 0.04])
    ahead = torch.tensor([0.0, 0.0, 9.0, 0.0])
    params = {**FULL, "top_p": 0.9001}
    near = gap(place(params, 0, 2), of(chances.log(), 0, 2), lambda *_: ahead)
    assert near < 0.01
    far = gap(place({**FULL, "top_p": 0.8}, 0, 2), of(chances.log(), 0, 2), lambda *_: ahead)
    assert far == pytest.approx(math.log(0.9 / 0.1) - math.log(0.8 / 0.2), rel=1e-4)


def test_a_token_within_the_nucleus_is_judged_by_its_score() -> None:
    chances = torch.tensor([0.6, 0.3, 0.06, 0.04])
    found = gap(place({**FULL, "top_p": 0.95}), of(chances.log()), without_noise)
    assert found == pytest.approx(math.log(2))


def test_what_the_rule_does_not_compute_is_never_excused() -> None:
    params = {**GREEDY, "repetition_penalty": 1.2}
    assert gap(place(params), of(torch.zeros(4)), without_noise) == math.inf


def test_only_differences_within_the_margin_are_excused_and_all_are_counted() -> None:
    run = Run([Request([5, 6], {**GREEDY, "max_tokens": n}) for n in (3, 4, 5)])
    answers = [output([1, 2, 3]), output([1, 0, 3]), output([0, 2, 3])]
    plain = {request.key: answer for request, answer in zip(run.requests, answers, strict=True)}
    found = places(run, result([1, 2, 3], [1, 1, 9], [1, 9, 9]), plain)
    assert found[0] is None
    assert [each and (each.context, each.plain, each.other) for each in found[1:]] == [
        ([5, 6, 1], 0, 1),
        ([5, 6], 0, 1),
    ]
    near, far = torch.tensor([1.0, 0.9, 0.0, 0.0]), torch.tensor([1.0, 0.5, 0.0, 0.0])
    judged = verdict(found, answers, [of(near), of(far)], without_noise, 0.25)
    assert (judged.requests, judged.tokens) == (3, 3 + 1 + 0)
    assert (judged.excused, judged.unexcused) == (1, 1)
    assert judged.as_json()["largest_excused_gap"] == pytest.approx(0.1)


def test_both_tokens_are_scored_where_answers_part_with_all_others_around_them() -> None:
    run = scoring([place(GREEDY)], 4)
    assert [request.prompt for request in run.requests] == [[5, 6, 7]] * 2
    assert [request.params["allowed_token_ids"] for request in run.requests] == [[0], [1]]
    answers = [
        Output([5, 6, 7], [[token]], [""], ["length"], [[[own, -1.0, -2.0]]], [], 0)
        for token, own in ((0, -2.0), (1, -1.0))
    ]
    (scores,) = scores_of(answers)
    assert (scores.plain, scores.other, scores.all.tolist()) == (-2.0, -1.0, [-1.0, -2.0])


def test_an_answer_that_ends_early_is_no_rounding() -> None:
    run = Run([Request([5, 6], GREEDY)])
    plain = {run.requests[0].key: output([1, 2, 3])}
    with pytest.raises(ValueError, match="is a prefix of the longer one"):
        places(run, result([1, 2]), plain)
