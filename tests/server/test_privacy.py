"""Long updates are shortened, noise has the scale that it should have, and epsilon is what the library says."""

import contextlib
import json
import math
import os
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcover as fc
from fedcover.errors import InvalidValue, RunError
from fedcover.runs.checkpoints import list_checkpoints, load_checkpoint
from fedcover.runs.experiment import read_experiment
from fedcover.server.aggregation import coverage_mean
from fedcover.server.clipping import change, clip_update, global_norm
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.grid_noise import keyed_stream
from fedcover.server.privacy import Gaussian, NoiseGrid, gaussian, most_turns, private_mean
from fedcover.server.round import aggregate, run_round
from fedcover.submodels.coverage import count
from fedcover.submodels.reductions import Masks, TrainedSubset
from fedcover.training.local_sgd import train_client
from tests.helpers.worlds import same, world

SMALL = {"clients": 20, "active": 4, "rounds": 3, "epochs": 1}
PRIVATE = {**SMALL, "clip_updates": 0.5, "privacy": "gaussian(noise=2.0, delta=1e-4)"}
STORED = [
    (0.5, 1, 1e-05, 24.381610883113737),
    (1.0, 10, 1e-05, 46.21121019121809),
    (2.0, 18, 1e-06, 28.498469321168777),
    (4.0, 18, 1e-06, 11.811159940267336),
    (16.0, 5, 1e-06, 1.1965273336464937),
    (100.0, 1000, 1e-10, 3.9841919906294443),
]
vectors = st.lists(
    st.tuples(st.floats(-50, 50), st.floats(-50, 50), st.booleans()), min_size=1, max_size=6
)


# ── clipping ────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200, deadline=None)
@given(vectors, st.floats(0.01, 100), st.booleans())
def test_an_update_is_shortened_on_its_own_entries(entries, limit, own):
    old, new, held = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*entries, strict=True)
    )
    bits = {"w": held.bool()}
    trained = TrainedSubset(Masks({}), bits) if own else Masks(bits)
    before, after = {"w": old}, clip_update({"w": old}, trained, {"w": new}, limit)
    moved = change(before, trained, after)["w"]
    wanted = torch.where(held.bool(), new - old, 0.0)
    far = float(wanted.norm())
    assert float(moved.norm()) <= limit * (1 + 1e-9) + 1e-12
    torch.testing.assert_close(moved, wanted * min(1.0, limit / far) if far else wanted)
    if far <= limit:
        assert after["w"] is new  # bit for bit


def round_of(**fields):
    setup, state = world(**fields)
    cohort = cohort_of(setup, 0)
    parts = setup.policy(view_of(setup, state, cohort))
    updates = [
        train_client(setup.task, state, c, r, 0.1) for c, r in zip(cohort, parts, strict=True)
    ]
    return setup, state, updates


@pytest.mark.parametrize("policy", ["rolling", "random", "magnitude"])
@pytest.mark.parametrize("rule", ["coverage_mean", "trimmed_mean", "median"])
def test_a_client_moves_the_model_by_at_most_the_limit(policy, rule):
    setup, state, updates = round_of(policy=policy, clip_updates=0.01, rule=rule)
    loud = [replace(updates[0], params={n: t + 100 for n, t in updates[0].params.items()})]
    after = aggregate(setup, state, loud)
    moved = {name: after.params[name] - state.params[name] for name in state.params}
    assert global_norm(moved) == pytest.approx(0.01)
    outside = count(state.params, [updates[0].trained])
    assert all(bool((moved[n][outside[n] == 0] == 0).all()) for n in moved)


def test_a_limit_that_nobody_reaches_changes_nothing():
    plain, state = world(policy="rolling")
    limited, _ = world(policy="rolling", clip_updates=1e6)
    (left, _), (right, report) = run_round(plain, state), run_round(limited, state)
    same(left.params, right.params)
    assert report.metrics["clipped"] == 0


def test_shortened_clients_are_counted():
    setup, state = world(policy="rolling", clip_updates=1e-9)
    assert run_round(setup, state)[1].metrics["clipped"] == 6


# ── noise ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_noise_has_the_scale_of_the_coverage_count():
    """Entry i is held by n clients: its mean carries noise of z * C / n, and none where nobody holds it."""
    size, clients, clip, noise = 200_000, 4, 0.3, 1.7
    old = {"w": torch.ones(size, dtype=torch.float64)}
    masks = [Masks({"w": torch.arange(size) % 5 > client}) for client in range(clients)]
    parts = [
        (mask, mask.extract(old)) for mask in masks
    ]  # nobody moves anything: what is left is the noise
    new = private_mean(old, parts, clip=clip, noise=noise, stream=keyed_stream(bytes(32)))
    counts = count(old, masks)["w"]
    assert sorted(set(counts.tolist())) == [0, 1, 2, 3, 4]
    for n in range(1, 5):
        seen = (new["w"] - 1)[counts == n]
        wanted = noise * clip / n
        error = 5 / math.sqrt(2 * len(seen))  # five standard errors of a standard deviation
        assert float(seen.std()) == pytest.approx(wanted, rel=error)
        assert abs(float(seen.mean())) < 5 * wanted / math.sqrt(len(seen))
        tail = float((seen.abs() > 2 * wanted).double().mean())  # of a normal: 4.55 %
        assert tail == pytest.approx(0.0455, abs=5 * math.sqrt(0.0455 / len(seen)))
    assert torch.equal(new["w"][counts == 0], old["w"][counts == 0])


@settings(max_examples=100, deadline=None)
@given(vectors, st.floats(0.01, 10), st.data())
def test_no_client_moves_the_sum_by_more_than_twice_the_limit(entries, clip, data):
    """The sensitivity: whatever a client answers, the same noise gives a sum within 2 C."""
    old, new, bits = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*entries, strict=True)
    )
    other = torch.tensor(
        data.draw(st.lists(st.floats(-1e6, 1e6), min_size=len(old), max_size=len(old)))
    )
    mine, whole = Masks({"w": bits.bool()}), Masks({})
    means = [
        private_mean({"w": old}, [(whole, {"w": old + 1}), (mine, {"w": answer})], clip=clip, noise=1.0,
                     stream=keyed_stream(bytes(32)))["w"]
        for answer in (new, other.double())
    ]  # fmt: skip
    counts = count({"w": old}, [mine, whole])["w"]
    assert float(((means[0] - means[1]) * counts).norm()) <= 2 * clip * (1 + 1e-6) + 1e-9


def difference(left, right):
    return {name: left[name].double() - right[name].double() for name in left}


def test_but_for_the_noise_it_is_the_coverage_mean():
    _, state, updates = round_of(policy="rolling")
    old = {name: tensor.double() for name, tensor in state.params.items()}
    parts = [(u.trained, {n: t.double() for n, t in u.params.items()}) for u in updates]
    still = [(u.trained, u.trained.extract(old)) for u in updates]
    answer, quiet = (
        private_mean(old, given, clip=1e3, noise=0.01, stream=keyed_stream(bytes(32)))
        for given in (parts, still)
    )
    wanted = coverage_mean(old, [(u.trained, u.params, 1.0) for u in updates])
    same(
        difference(answer, quiet),
        difference(wanted, old),
        tolerance=len(updates) * NoiseGrid(1e3, 0.01).step,
    )


def test_sums_and_counts_are_whole_numbers_whatever_the_model_is_kept_in():
    """Counted in float16, steps of a grid of 2^30 would be infinite, and counts above 2,048 would stand still."""
    old = {"w": torch.zeros(3, dtype=torch.float16)}
    mask = Masks({"w": torch.tensor([True, True, False])})
    moved = {"w": torch.tensor([0.5, -0.25, 0.0], dtype=torch.float16)}
    new = private_mean(
        old, [(mask, moved)] * 3000, clip=1.0, noise=0.01, stream=keyed_stream(bytes(32))
    )
    torch.testing.assert_close(
        new["w"].double(), torch.tensor([0.5, -0.25, 0.0], dtype=torch.float64), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("noise", [0.01, 1.0, 3.7, 1e6])
def test_the_whole_update_is_clipped_not_each_tensor(noise):
    """Four tensors, each of length 3 of which 2 are allowed together: what counts is the length of all, 6."""
    old = {name: torch.zeros(9, 1000, dtype=torch.float64) for name in "abcd"}
    loud = {name: tensor + 3 / math.sqrt(tensor.numel()) for name, tensor in old.items()}
    means = [
        private_mean(
            old, [(Masks({}), given)], clip=2.0, noise=noise, stream=keyed_stream(bytes(32))
        )
        for given in (loud, old)
    ]
    assert global_norm(difference(*means)) == pytest.approx(2.0, rel=1e-3)
    steps = NoiseGrid(2.0, noise).steps(loud)
    assert (
        sum(int(tensor.square().sum()) for tensor in steps.values())
        <= NoiseGrid(2.0, noise).max_square_sum
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=6),
    st.floats(1e-30, 1e30),
    st.floats(0.01, 1e6),
)
def test_no_rounding_makes_an_update_longer_than_the_limit(entries, clip, noise):
    """In whole numbers: the sum of squares is at most (C in steps)^2, and no step is lost on the way to the model."""
    grid = NoiseGrid(clip, noise)
    steps = grid.steps({"w": torch.tensor(entries, dtype=torch.float64)})["w"].tolist()
    assert (
        sum(step**2 for step in steps)
        <= grid.max_square_sum
        <= (Fraction(2) ** grid.bits / Fraction(noise)) ** 2
    )
    assert 2**60 <= grid.max_square_sum <= 2**62
    assert grid.step * 2.0**grid.bits == noise * clip
    if grid.step * 2**30 > math.hypot(*entries):
        there = torch.tensor(steps, dtype=torch.float64) * grid.step
        torch.testing.assert_close(
            there, torch.tensor(entries, dtype=torch.float64), rtol=1e-9, atol=grid.step
        )


def test_an_update_of_one_number_is_shortened_to_the_limit_itself():
    grid = NoiseGrid(1.0, 1.0)
    assert grid.steps({"w": torch.tensor([-4.0])})["w"].tolist() == [-(2**31)]
    assert grid.max_square_sum == 2**62


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e200])
def test_an_update_without_a_length_counts_as_none(odd):
    assert NoiseGrid(1.0, 1.0).steps({"w": torch.tensor([odd, 1.0], dtype=torch.float64)})[
        "w"
    ].tolist() == [0, 0]
    old, loud = {"w": torch.zeros(2)}, {"w": torch.tensor([odd, 1.0], dtype=torch.float64)}
    means = [
        private_mean(old, [(Masks({}), part)], clip=1.0, noise=1.0, stream=keyed_stream(bytes(32)))
        for part in (loud, old)
    ]
    same(*means)


def test_a_key_of_noise_serves_one_round():
    """Not the experiment's seed, nor any other: whoever knows that could subtract the noise."""
    setup, state, updates = round_of(
        policy="rolling", privacy="gaussian(noise=1.0)", clip_updates=1.0
    )
    left, right = aggregate(setup, state, updates), aggregate(setup, state, updates)
    assert all(not torch.equal(left.params[name], right.params[name]) for name in left.params)
    fixed = replace(setup, noise=lambda: keyed_stream(bytes(32)))
    same(aggregate(fixed, state, updates).params, aggregate(fixed, state, updates).params)


# ── accounting ──────────────────────────────────────────────────────────────────────────────────────────


def test_epsilon_is_the_librarys():
    """By its own analytic formula, everywhere; an older accountant (RDP) was above it by 2 to 13 %."""
    pytest.importorskip("dp_accounting")
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    for noise, turns, delta in product(
        (0.01, 0.5, 2.0, 8.0, 40.0), (1, 18, 1000, 10**6), (1e-15, 1e-10, 1e-5)
    ):
        wanted = get_epsilon_gaussian(noise / 2 / math.sqrt(turns), delta)
        assert Gaussian(noise, delta).epsilon(turns) == pytest.approx(wanted, rel=1e-7)
    assert Gaussian(1.0, 1e-5).epsilon(0) == 0
    assert Gaussian(1e6, 1e-5).epsilon(1) == 0  # its delta is below that even at epsilon 0


def test_epsilon_is_that_of_privacy_loss_distributions():
    """Another way: the distribution of the privacy loss on a grid, composed turn by turn; it may only be above."""
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    for noise, turns, delta in [(2.0, 4, 1e-5), (8.0, 20, 1e-6), (40.0, 50, 1e-5)]:
        composed = from_gaussian_mechanism(
            noise / 2, value_discretization_interval=1e-3
        ).self_compose(turns)
        mine = Gaussian(noise, delta).epsilon(turns)
        assert mine <= composed.get_epsilon_for_delta(delta) <= mine * 1.01 + 1e-3


@pytest.mark.parametrize(("noise", "turns", "delta", "epsilon"), STORED)
def test_epsilon_is_what_the_library_once_said(noise, turns, delta, epsilon):
    """get_epsilon_gaussian(noise / 2 / sqrt(turns), delta) of dp-accounting 0.6.0, for where that is not installed."""
    assert Gaussian(noise, delta).epsilon(turns) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize(
    ("noise", "turns", "delta"),
    [(0.3, 1, 1e-6), (2.0, 18, 1e-6), (50.0, 7, 1e-6), (8.0, 1, 0.097), (8.0, 1, 0.09)],
)
def test_at_epsilon_delta_is_what_the_formula_says(noise, turns, delta):
    """With noise 8 and one turn delta is 0.0995 at epsilon 0, so the last two epsilons are small, but not 0."""
    mu = 2 * math.sqrt(turns) / noise
    assert delta_of_gaussian(Gaussian(noise, delta).epsilon(turns), mu) == pytest.approx(
        delta, rel=1e-6
    )


def delta_of_gaussian(epsilon, mu):
    """Balle, Wang 2018, theorem 8, as it is printed."""

    def normal(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)


def test_turns_are_those_of_the_busiest_client():
    setup, _ = world()
    cohorts = [[client.id for client in cohort_of(setup, round)] for round in range(setup.rounds)]
    assert [setup.turns(round) for round in (2, 0, 1)] == [
        list(most_turns(cohorts))[round] for round in (2, 0, 1)
    ]
    for round in range(setup.rounds):
        asked = [client for cohort in cohorts[: round + 1] for client in cohort]
        assert setup.turns(round) == max(asked.count(client) for client in asked)


def test_whoever_was_never_asked_has_taken_no_turn():
    """Everybody may drop out of a round."""
    assert list(most_turns([[], [], [4], []])) == [0, 0, 1, 1]


def test_epsilon_is_in_the_history_and_in_the_summary(tmp_path):
    pytest.importorskip("cryptography")
    run = fc.run(fc.Experiment(**PRIVATE), tmp_path / "run")
    spent = [line["epsilon"] for line in run.metrics]
    assert spent == [Gaussian(2.0, 1e-4).epsilon(run.setup.turns(round)) for round in range(3)]
    assert spent == sorted(spent)
    assert run.summary["epsilon"] == spent[-1]
    assert [line["epsilon"] for line in fc.load(tmp_path / "run").metrics] == spent


def test_a_private_round_is_never_run_again(tmp_path):
    """Its noise would be fresh, and the epsilon of two releases is not that of one."""
    pytest.importorskip("cryptography")
    wanted = fc.Experiment(**{**PRIVATE, "checkpoint_every": 100})
    seen = []

    def look(report):
        seen.append(fc.load(tmp_path / "run").state.round)

    fc.run(wanted, tmp_path / "run", watch=look)
    assert seen == list(range(1, wanted.rounds + 1))


@pytest.fixture
def ended(tmp_path):
    """A private run that keeps the models of all its rounds."""
    pytest.importorskip("cryptography")
    fc.run(fc.Experiment(**PRIVATE, keep_rounds=(0, 1, 2, 3)), tmp_path / "run")
    return tmp_path / "run"


def checkpoints_of(folder):
    return sorted((folder / "checkpoints").iterdir())


def without(folder, *names):
    """Remove some files of a run, or all in its folders of that name."""
    for name in names:
        for path in [*(folder / name).iterdir()] if (folder / name).is_dir() else [folder / name]:
            path.unlink()


@pytest.mark.parametrize(
    ("lost", "last"),
    [
        (("checkpoints",), 3),
        (("checkpoints", "metrics.jsonl"), 3),
        (("checkpoints", "kept"), 3),
        (("checkpoints", "kept", "metrics.jsonl"), 3),
        (("checkpoints", "metrics.jsonl", "summary.json"), 3),
        (("checkpoints", "kept", "summary.json"), 3),
    ],
)
def test_a_private_run_without_its_checkpoints_does_not_start_again(ended, lost, last):
    """Its rounds would be released twice, with other noise, and counted once."""
    without(ended, *lost)
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    sentence = f"run is private and has released {last} rounds, but its newest intact checkpoint is of round 0: .*new run"
    with pytest.raises(RunError, match=sentence):
        fc.resume(ended)
    assert before == {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "harm", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1])]
)
def test_a_private_run_does_not_go_on_from_an_older_checkpoint(ended, harm):
    harm(checkpoints_of(ended)[-1])
    with pytest.raises(
        RunError, match="released 3 rounds, but its newest intact checkpoint is of round 2"
    ):
        fc.resume(ended)


@pytest.mark.parametrize("left", [0.0, 0.4, 0.7, 0.99])
@pytest.mark.parametrize("go_on", [fc.load, fc.resume])
def test_a_line_that_is_half_written_makes_epsilon_no_smaller(go_on, left, tmp_path):
    """The round's model is in its checkpoint, so it counts, also where a kill left no whole line of it."""
    pytest.importorskip("cryptography")
    ended = tmp_path / "run"
    fc.run(fc.Experiment(**{**PRIVATE, "clients": 2, "active": 2}), ended)
    spent = fc.load(ended).summary["epsilon"]
    lines = (ended / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (ended / "metrics.jsonl").write_bytes(
        b"".join(lines[:-1]) + lines[-1][: int(left * len(lines[-1]))]
    )
    assert go_on(ended).summary["epsilon"] == spent
    if go_on is fc.resume:
        assert json.loads((ended / "summary.json").read_text())["epsilon"] == spent
        assert len((ended / "metrics.jsonl").read_bytes().splitlines()) == 3


def test_two_models_of_one_private_round_are_seen(ended):
    known = sorted((ended / "kept").iterdir())[1]
    (ended / "kept" / f"round-000001.{'0' * 16}.safetensors").write_bytes(known.read_bytes())
    with pytest.raises(RunError, match="kept holds two models of round 1, and epsilon counts one"):
        fc.resume(ended)


def test_a_private_run_is_not_overwritten(ended):
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="holds a private run, and what it has released counts"):
        fc.run(fc.Experiment(**PRIVATE), ended, overwrite=True)
    assert before == {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}


def test_a_private_run_does_not_begin_beside_models_of_another(ended):
    without(
        ended, "checkpoints", "metrics.jsonl", "summary.json", "experiment.toml", "manifest.json"
    )
    with pytest.raises(RunError, match="kept holds models of another run"):
        fc.run(fc.Experiment(**PRIVATE), ended)


@pytest.mark.parametrize("lost", [("checkpoints", "metrics.jsonl", "summary.json")])
def test_a_private_run_of_which_kept_models_are_left_is_not_overwritten(ended, lost):
    """What was released counts."""
    without(ended, *lost)
    kept = models_of(ended)
    with pytest.raises(RunError, match="holds a private run, and what it has released counts"):
        fc.run(fc.Experiment(**PRIVATE), ended, overwrite=True)
    assert models_of(ended) == kept


def test_a_private_run_of_an_earlier_version_is_not_gone_on_with(ended, caplog):
    fc.load(ended)
    assert not caplog.text
    manifest = json.loads((ended / "manifest.json").read_text())
    assert manifest.pop("noise") == "aes-256-ctr, a key for each round"
    (ended / "manifest.json").write_text(json.dumps(manifest))
    sentence = "private run of an earlier version: its noise can be found and taken off"
    with pytest.raises(RunError, match=sentence):
        fc.resume(ended)
    caplog.clear()
    fc.load(ended)
    assert sentence in caplog.text


@pytest.mark.parametrize(
    "moment", range(65)
)  # all that a whole run does to its files, and one more
def test_wherever_a_private_run_is_stopped_it_releases_each_round_once(
    tmp_path, monkeypatch, moment
):
    """Stopped at any file operation: what is on disk of a round is never run again, nor lost."""
    pytest.importorskip("cryptography")
    experiment, folder = fc.Experiment(**PRIVATE, keep_rounds=(0, 1, 2, 3)), tmp_path / "run"
    left = [moment]

    def dying(function):
        def step(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:  # dead: nothing more is done to any file
                raise Killed
            return function(*args, **kwargs)

        return step

    class Killed(BaseException):
        pass

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "unlink", "mkdir"):
            patch.setattr(os, name, dying(getattr(os, name)))
        with contextlib.suppress(Killed):
            fc.run(experiment, folder)
    if not (folder / "experiment.toml").exists():
        return
    before = models_of(folder)
    run = fc.resume(folder)
    assert len(checkpoints_of(folder)) == 2
    after = models_of(folder)
    assert before <= after
    assert sorted(round for round, _ in after) == [0, 1, 2, 3]
    assert [line["round"] for line in run.metrics] == [0, 1, 2]
    assert run.summary["epsilon"] == Gaussian(2.0, 1e-4).epsilon(run.setup.turns(2))
    assert (3, bits_of(run.state)) in after


def models_of(folder):
    """Every model in a run folder, with its round: one model for each round, however often it is there."""
    digest = read_experiment(folder / "experiment.toml").digest
    files = [file for place in ("checkpoints", "kept") for file in list_checkpoints(folder / place)]
    return {(file.round, bits_of(load_checkpoint(file, digest, "cpu"))) for file in files}


def bits_of(state):
    return b"".join(tensor.numpy().tobytes() for tensor in state.params.values())


def test_without_privacy_no_epsilon_is_told():
    assert "epsilon" not in fc.run(fc.Experiment(**SMALL)).summary


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"clip_updates": None},
            "clip_updates must be a length to which updates are clipped with privacy; got None",
        ),
        (
            {"rule": "median"},
            "rule must be coverage_mean without options with privacy; got 'median'",
        ),
        (
            {"rule": "coverage_mean(over=clients)"},
            "rule must be coverage_mean without options with privacy; got ",
        ),
        ({"weights": "samples"}, "weights must be uniform with privacy; got 'samples'"),
        ({"label_rows": True}, r"label_rows must be false .* with privacy; got True"),
        ({"privacy": "gaussian"}, "privacy gaussian needs the option 'noise'"),
    ],
)
def test_what_is_not_private_is_refused(fields, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        fc.Experiment(**{**PRIVATE, **fields})


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 1e300, 1e-300])
def test_noise_must_be_noise(value):
    with pytest.raises(
        InvalidValue, match=r"^privacy gaussian: noise must be in \[0.01, 1e\+06\]; got "
    ):
        gaussian(noise=value)
    with pytest.raises(
        InvalidValue, match=r"^privacy gaussian: delta must be in \[1e-15, 1\); got "
    ):
        gaussian(noise=1.0, delta=value)


@pytest.mark.parametrize("delta", [1.0, 1.5, 9e-16])
def test_delta_is_a_chance_that_is_neither_certain_nor_too_small_to_tell(delta):
    with pytest.raises(InvalidValue, match=r"delta must be in \[1e-15, 1\)"):
        gaussian(noise=1.0, delta=delta)
    assert gaussian(noise=1.0, delta=1e-15).delta == 1e-15


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"privacy": "gaussian(noise=1e300)"},
            r"^privacy gaussian: noise must be in .*; got 1e\+300$",
        ),
        (
            {"privacy": "gaussian(noise=1e-300)"},
            r"^privacy gaussian: noise must be in .*; got 1e-300$",
        ),
        (
            {"privacy": "gaussian(noise=1, delta=0)"},
            r"^privacy gaussian: delta must be in .*; got 0$",
        ),
        (
            {"clip_updates": 1e-300},
            r"^clip_updates must be in \[1e-30, 1e\+30\] with privacy; got 1e-300$",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_door(fields, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        fc.Experiment(**{**PRIVATE, **fields})


@pytest.mark.parametrize("clip", [1e-30, 1e30])
def test_the_least_and_the_longest_length_are_allowed(clip):
    assert fc.Experiment(**{**PRIVATE, "clip_updates": clip}).clip_updates == clip


@pytest.mark.parametrize("noise", [0.01, 1e6])
def test_the_least_and_the_most_noise_can_be_accounted_for(noise):
    spent = [Gaussian(noise, 1e-5).epsilon(turns) for turns in (1, 100, 10**6)]
    assert all(math.isfinite(epsilon) for epsilon in spent)
    assert spent == sorted(spent)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"model": "wide_resnet(depth=10, widen=1)"},
            "privacy: batch norm of model .* use norm = 'group'",
        ),
        (
            {"policy": "prunefl", "recipe": "prunefl"},
            "privacy: what clients measure under recipe 'prunefl'",
        ),
        (
            {"privacy": "gaussian(noise=1.0, delta=0.5)"},
            r"privacy: delta must be below 1 / clients .* got 0\.5",
        ),
        (
            {"privacy": "fedcover.training.recipes:plain"},
            "must make a fedcover Gaussian; got Recipe",
        ),
        ({"recipe": "hermes"}, "privacy: with this recipe a client chooses what it trains"),
    ],
)
def test_what_would_pass_the_noise_is_refused(fields, sentence, tmp_path):
    pytest.importorskip("cryptography")
    data = "synthetic(shape=(3, 8, 8), classes=3, samples=7, test_size=50)"
    with pytest.raises(InvalidValue, match=sentence):
        fc.run(fc.Experiment(**{**PRIVATE, "dataset": data, **fields}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_group_norms_are_private(tmp_path):
    pytest.importorskip("cryptography")
    data = "synthetic(shape=(3, 8, 8), classes=3, samples=7, test_size=50)"
    model = {
        "dataset": data,
        "model": "wide_resnet(depth=10, widen=1)",
        "norm": "group",
        "rounds": 1,
        "active": 2,
    }
    assert fc.run(fc.Experiment(**{**PRIVATE, **model})).summary["epsilon"] > 0


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(InvalidValue, match=r"^privacy needs cryptography; .*\[privacy\]'$"):
        fc.run(fc.Experiment(**PRIVATE))


def test_an_undeclared_measurement_is_refused():
    setup, state, _ = round_of(policy="prunefl", recipe="prunefl")
    careless = replace(setup.task, recipe=replace(setup.task.recipe, measures={}))
    with pytest.raises(
        InvalidValue,
        match=r"^recipe measures 'squared_gradient', which its `measures` do not name$",
    ):
        run_round(replace(setup, task=careless), state)
