"""The certificate: proved where everything is known, an honest estimate elsewhere, and never a
bound that is broken.
"""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcover as fc
from fedcover.errors import InvalidValue, RunError
from fedcover.policies import POLICIES, as_policy
from fedcover.server.round import run_round
from fedcover.submodels.reductions import Masks, windows
from fedcover.tensors import squared_norm
from fedcover.theory import BOUNDS, Constants, LocalSteps
from fedcover.theory.certificate.global_loss import build_global_loss
from fedcover.theory.certificate.replay import replay_round
from fedcover.theory.convex import convex_constants, minimise
from fedcover.training.engines import ENGINES
from tests.helpers.worlds import SMALL_MODELS, world

SOFTMAX = {
    "dataset": ("synthetic(shape=(4,), classes=3, samples=20, test_size=20, noise=1.0)"),
    "model": "softmax",
    "clients": 6,
    "active": 6,
    "assignment": "slot",
    "rounds": 25,
    "keep_rounds": range(25),
    "epochs": 1,
    "batch_size": 20,
    "momentum": 0.0,
    "weight_decay": 0.5,
    "lr": 0.4,
    "checkpoint_every": 25,
}


def certified(folder, parts=None, only_now=None, **fields):
    fc.run(fc.Experiment(**fields), folder, **(parts or {}), **(only_now or {}))
    return fc.certify(folder, **(parts or {}))


class TestSoftmaxRegression:
    """Constants are proved, the optimum is known: the certificate is one."""

    def test_certificate_with_full_coverage(self, tmp_path):
        certificate = certified(
            tmp_path / "run", fleet="2x1.0 + 4x0.75", policy="magnitude", **SOFTMAX
        )
        bound = certificate["bounds"]["reshuffled"]
        assert certificate["kind"] == "certificate"
        assert bound["genuine"]
        assert not bound["vacuous"]
        assert 0 < bound["left"] <= bound["value"]
        assert certificate["coverage"]["gamma"] == certificate["coverage"]["gamma_union"] == 2
        start = certificate["constants"]["F_0"]["value"] - certificate["last"]["F_optimum"]
        assert 0 <= certificate["last"]["above"] <= certificate["last"]["above_at_most"]
        assert (
            certificate["last"]["above"] < 0.02 * start
        )  # the neighbourhood of the optimum, not the optimum
        assert json.loads((tmp_path / "run" / "certificate.json").read_text()) == certificate

    def test_certified_run_without_noise_reaches_the_optimum(self, tmp_path):
        certificate = certified(tmp_path / "run", fleet="1x1.0", policy="full", **SOFTMAX)
        assert certificate["last"]["above"] < 1e-4
        assert certificate["coverage"]["noise"] == 0
        assert certificate["bounds"]["reshuffled"]["terms"]["noise"] == 0

    def test_certificate_of_the_union_of_trained_parameters(self, tmp_path):
        """Coverage 0: everybody looks at the first two of four features.

        The optimum is that of these two.
        """
        certificate = certified(tmp_path / "run", fleet="1x0.5", policy="prefix", **SOFTMAX)
        assert (certificate["coverage"]["gamma"], certificate["coverage"]["gamma_union"]) == (0, 6)
        assert certificate["coverage"]["never_trained"] == 2 * 3
        assert certificate["bounds"]["reshuffled"]["genuine"]
        assert certificate["last"]["above"] < 1e-4
        run = fc.load(tmp_path / "run")
        rows = [run.setup.task.source.shard(client).samples for client in range(6)]
        x, y = torch.cat([r.x for r in rows]).double()[:, :2], torch.cat([r.y for r in rows])
        head = torch.zeros(3, 3, dtype=torch.float64)  # two features and the bias
        ones = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        for _ in range(4000):
            slope = (
                (torch.softmax(ones @ head.T, 1) - torch.eye(3, dtype=torch.float64)[y]).T
                @ ones
                / len(x)
            )
            head -= 0.5 * (slope + 0.5 * head)
        least = torch.nn.functional.cross_entropy(ones @ head.T, y) + 0.25 * head.square().sum()
        assert certificate["last"]["F_optimum"] == pytest.approx(float(least), abs=1e-9)

    def test_certificate_with_mini_batches_and_local_steps(self, tmp_path):
        fields = {
            **SOFTMAX,
            "batch_size": 5,
            "epochs": 2,
            "lr": 0.02,
            "rounds": 5,
            "keep_rounds": range(5),
        }
        certificate = certified(
            tmp_path / "run", fleet="2x1.0 + 4x0.75", policy="magnitude", **fields
        )
        bound = certificate["bounds"]["reshuffled"]
        assert bound["genuine"]
        assert bound["left"] <= bound["value"]
        assert certificate["local_steps"] == 8
        assert certificate["lemmas"]["split_error"] < 1e-6
        assert 0 < certificate["lemmas"]["drift"] <= 1
        assert 0 < certificate["lemmas"]["gap"] <= 1
        assert 0 < certificate["lemmas"]["noise"] <= 1
        assert "shuffled" in " ".join(certificate["bounds"]["sharper"]["outside"])

    def test_certificate_is_an_estimate_if_rounds_are_missing(self, tmp_path):
        certificate = certified(
            tmp_path / "run", fleet="1x1.0", policy="full", **{**SOFTMAX, "keep_rounds": [0, 12]}
        )
        assert certificate["kind"] == "estimate"
        assert certificate["replayed"] == [0, 12]
        assert "2 of 25 rounds" in certificate["notes"][0]


THREE = {
    **SOFTMAX,
    "dataset": "three",
    "model": "softmax(bias=false, pinned=true)",
    "clients": 2,
    "active": 2,
    "fleet": "1x1/3",
    "partition": "iid",
    "batch_size": 50,
}


class TestThreeParameters:
    """The paper's example: theta = (theta_1, theta_2, theta_3), one local model has theta_1,
    another theta_3.
    """

    @staticmethod
    def parts():
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(100, 3, generator=draw)
        y = (x @ torch.tensor([2.0, 1.0, -1.0]) + 0.5 * torch.randn(100, generator=draw) > 0).long()

        def ends(view):
            return [
                Masks({"head.weight": torch.tensor([[client.slot == 0, False, client.slot == 1]])})
                for client in view.cohort
            ]

        return {"dataset": fc.from_tensors((x, y), (x, y)), "policy": ends}

    def test_certified_union_of_two_clients_converges(self, tmp_path):
        parts = self.parts()
        certificate = certified(tmp_path / "run", parts, **THREE)
        before = fc.run(fc.Experiment(**{**THREE, "rounds": 1, "keep_rounds": ()}), **parts)
        after = fc.load(tmp_path / "run", **parts).state.params["head.weight"]
        assert after[0, 1] == before.state.params["head.weight"][0, 1]  # theta_2: nobody's
        assert (certificate["coverage"]["gamma"], certificate["coverage"]["gamma_union"]) == (0, 1)
        assert certificate["coverage"]["never_trained"] == 1
        bound = certificate["bounds"]["reshuffled"]
        assert bound["genuine"]
        assert bound["left"] <= bound["value"]
        first, last = certificate["left"]["by_round"]["0"], certificate["last"]
        assert last["gradient"] < 0.2 * first["whole"]
        assert last["above"] <= last["best_round_above_at_most"]

    def test_certify_needs_python_parts_again(self, tmp_path):
        certified(tmp_path / "run", self.parts(), **{**THREE, "rounds": 2, "keep_rounds": [0]})
        with pytest.raises(RunError, match="its own dataset, policy: give it again"):
            fc.certify(tmp_path / "run")


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from([1.0, 0.3]),
    momentum=st.sampled_from([0.0, 0.5]),
    batch_size=st.sampled_from([2, 3, 7]),
    decay=st.sampled_from([0.0, 0.2]),
)
def test_theorem_r_on_random_softmax_problems(seed, share, momentum, batch_size, decay):
    """One replayed round in float64 with random masks: measured is below the bound, with the loss
    after it as least.
    """
    fields = {
        "momentum": momentum,
        "batch_size": batch_size,
        "weight_decay": decay,
        "epochs": 2,
        "seed": seed,
    }
    setup, state = world("softmax", active=3, clients=5, fleet="1x1.0", **fields)
    global_loss = build_global_loss(setup, 10)
    draw = torch.Generator().manual_seed(seed)
    chosen = [Masks({"head.weight": torch.rand(3, 12, generator=draw) < 0.6}) for _ in range(3)]
    weights = torch.cat([state.params["head.weight"], state.params["head.bias"][:, None]], 1)
    rows = [global_loss.rows(client).x for client in range(5)]
    constant = convex_constants(
        rows, weights, bias=True, decay=decay, batch_size=batch_size, decay_contracts=momentum == 0
    )
    steps = LocalSteps(2 * -(-7 // batch_size), momentum)
    lr = share / (constant.smoothness * steps.total)
    setup = replace(setup, policy=as_policy(lambda view: chosen), lr=lambda round: lr)
    everything = {
        name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in state.params.items()
    }
    replay = replay_round(setup, state, global_loss, everything, num_probes=2)
    after, _ = run_round(setup, state)
    constants = Constants(
        smoothness=constant.smoothness,
        batch_smoothness=constant.batch_smoothness,
        gradient=0.0,
        step_gradient=max(path.step_gradient for path in replay.paths),
        variance=0.0,
        start=replay.value,
        least=global_loss.evaluate(after.params).value,
        steps=steps,
        rounds=1,
        lr_sum=lr,
    )
    bound = BOUNDS["reshuffled"](constants, [replay.quantities])
    assert bound.left <= bound.value * (1 + 1e-9)
    assert all(path.batch_secant <= constant.batch_smoothness for path in replay.paths)
    assert all(path.secant <= constant.smoothness for path in replay.paths)
    assert constants.step_gradient <= constant.gradient
    assert replay.dissimilarity <= constant.dissimilarity
    assert max(path.split_error for path in replay.paths) < 1e-12


@pytest.mark.parametrize(
    "name", sorted(set(SMALL_MODELS) - {"depth_resnet", "preact_resnet18", "transformer", "lstm"})
)
def test_certificate_of_every_model(name, tmp_path):
    model, dataset = SMALL_MODELS[name]
    fields = {
        "model": model,
        "dataset": dataset,
        "fleet": "2x1.0 + 2x0.5",
        "clients": 4,
        "active": 4,
        "policy": "prefix",
        "rounds": 2,
        "keep_rounds": [1, 2],
        "epochs": 1,
        "batch_size": 4,
        "calibration": 20,
    }
    fc.run(fc.Experiment(**fields), tmp_path / "run")
    certificate = fc.certify(tmp_path / "run", steps=2, clients=4)
    assert certificate["replayed"] == [1]
    assert (
        certificate["kind"] == "estimate"
    )  # one round of two, and nothing is proved about networks
    assert certificate["lemmas"]["split_error"] < 1e-5
    assert certificate["lemmas"]["gap"] <= 1
    assert all(constant["value"] >= 0 for constant in certificate["constants"].values())


def test_certificate_names_violated_assumptions(tmp_path):
    certificate = certified(
        tmp_path / "run",
        dataset="synthetic(samples=7)",
        model="mlp(hidden=[4], dropout=0.1)",
        fleet="1x1.0 + 1x0.5",
        policy="planned",
        recipe="prox",
        clip=1.0,
        server="momentum",
        schedule="cosine",
        momentum=0.9,
        lr=1.0,
        clients=4,
        active=2,
        rounds=3,
        epochs=3,
        batch_size=3,
        keep_rounds=[0, 2],
    )
    output = " ".join(certificate["bounds"]["printed_one"]["outside"])
    for words in (
        "recipe prox, clipping",
        "server momentum",
        "dropout",
        "momentum 0.9",
        "schedule cosine",
        "shuffled",
    ):
        assert words in output
    assert "capacity belongs to the device" in " ".join(
        certificate["bounds"]["partial_participation"]["outside"]
    )
    sharper = certificate["bounds"]["sharper"]
    assert not sharper["applies"]
    assert sharper["vacuous"]
    assert sharper["conditions"][0]["violated"] > 1


BRIEF = {**SOFTMAX, "rounds": 4, "keep_rounds": range(4)}


def all_outside(found, words):
    """Whether every theorem says in these words why it does not apply, so that nothing is
    certified.
    """
    bounds = found["bounds"].values()
    return found["kind"] == "estimate" and all(
        words in " ".join(bound["outside"]) for bound in bounds
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clip_updates": 1e-6}, "the server does more than average: clip_updates 1e-06"),
        (
            {"clip_updates": 0.01, "privacy": "gaussian(noise=5.0)"},
            "clip_updates 0.01, privacy gaussian(noise=5.0)",
        ),
    ],
)
def test_certificate_excludes_clipped_and_private_updates(fields, words, tmp_path):
    assert all_outside(certified(tmp_path / "run", **BRIEF, **fields), words)


def test_certificate_excludes_reduced_precision(tmp_path):
    fc.run(fc.Experiment(**BRIEF), tmp_path / "run", machine=fc.Machine(precision="bf16"))
    assert all_outside(fc.certify(tmp_path / "run"), "local steps were computed in bf16")


def test_certificate_excludes_runs_resumed_in_reduced_precision(tmp_path):
    def stop(report):
        if report.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fc.run(fc.Experiment(**BRIEF), tmp_path / "run", watch=stop)
    fc.resume(tmp_path / "run", machine=fc.Machine(precision="bf16"), force=True)
    assert all_outside(fc.certify(tmp_path / "run"), "local steps were computed in bf16")


SPARSE = {**SOFTMAX, "active": 1, "drop_out": 0.7, "rounds": 20, "keep_rounds": range(20)}


class TestRoundsWithoutAnswers:
    """A round in which nobody trains changes nothing: it is no round of a theorem, and lacks in no
    mean.
    """

    def test_empty_rounds_do_not_divide_a_bound(self, tmp_path):
        certificate = certified(tmp_path / "run", **{**SPARSE, "schedule": "cosine"})
        run = fc.load(tmp_path / "run")
        trained = [line["round"] for line in run.metrics if line["train_loss"] is not None]
        assert certificate["replayed"] == trained
        assert 0 < len(trained) < 20
        fell = (
            certificate["constants"]["F_0"]["value"] - certificate["constants"]["F_least"]["value"]
        )
        walked = certificate["local_steps"] * sum(run.setup.lr(round) for round in trained)
        assert certificate["bounds"]["reshuffled"]["terms"]["start"] == pytest.approx(
            2 * fell / walked
        )
        printed = certificate["bounds"]["printed_one"]["conditions"][1]["allowed"]
        assert printed == pytest.approx(1 / (certificate["local_steps"] * len(trained) ** 0.5))

    def test_bound_with_empty_rounds_stays_above_the_measurement(self, tmp_path):
        """Equal data and one client a round: if the empty rounds counted, the bound would be below
        the left side.
        """
        draw = torch.Generator().manual_seed(0)
        x = torch.nn.functional.normalize(torch.randn(20, 5, generator=draw))
        rows = (x.repeat(4, 1), (x[:, 0] > 0).long().repeat(4))
        parts = {
            "dataset": fc.from_tensors(rows, rows, owner=torch.arange(4).repeat_interleave(20))
        }
        fields = {
            "partition": "owner",
            "clients": 4,
            "weight_decay": 0.001,
            "lr": 0.45,
            "drop_out": 0.9,
        }
        wide = {"rounds": 60, "keep_rounds": range(60), "checkpoint_every": 60}
        certificate = certified(tmp_path / "run", parts, **{**SPARSE, **fields, **wide})
        assert all(
            bound["left"] <= bound["value"]
            for bound in certificate["bounds"].values()
            if bound["applies"]
        )
        assert certificate["bounds"]["sharper"]["applies"]

    def test_empty_rounds_are_not_missing(self, tmp_path):
        certificate = certified(tmp_path / "run", **SPARSE)
        assert certificate["kind"] == "certificate"
        assert certificate["constants"]["G_step"]["kind"] == "exact"
        assert "keep all" not in " ".join(certificate["notes"])
        assert f"in {20 - len(certificate['replayed'])} of 20 rounds nobody trained" in " ".join(
            certificate["notes"]
        )

    def test_rounds_not_kept_are_missing_only_if_a_client_trained(self, tmp_path):
        certificate = certified(tmp_path / "run", **{**SPARSE, "keep_rounds": range(15)})
        lines = fc.load(tmp_path / "run").metrics
        trained = [line["round"] for line in lines if line["train_loss"] is not None]
        assert certificate["kind"] == "estimate"
        assert certificate["replayed"] == [round for round in trained if round < 15]
        assert (
            f"means over {len(certificate['replayed'])} of {len(trained)} rounds"
            in certificate["notes"][0]
        )


class TestThoseWhoDidNotAnswer:
    """On a real fleet an answer may be rejected, late or lost; the replay asks only those who
    answered.
    """

    def test_round_is_replayed_with_the_clients_that_answered(self, tmp_path):
        def lossy(task, state, work, lr):
            return list(ENGINES["sequential"](task, state, work[: max(0, 6 - state.round)], lr))

        fields = {**SOFTMAX, "rounds": 8, "keep_rounds": range(8), "checkpoint_every": 8}
        certificate = certified(tmp_path / "run", None, {"engine": lossy}, **fields)
        assert certificate["replayed"] == [0, 1, 2, 3, 4, 5]
        assert certificate["coverage"]["gamma"] == 1
        assert (
            certificate["bounds"]["reshuffled"]["left"]
            <= certificate["bounds"]["reshuffled"]["value"]
        )

    def test_certify_refuses_a_run_without_answers(self, tmp_path):
        fields = {**SOFTMAX, "rounds": 2, "keep_rounds": range(2)}
        with pytest.raises(RunError, match="no client answered"):
            certified(tmp_path / "run", None, {"engine": lambda *_: []}, **fields)


def test_theorem_r_gives_no_bound_for_clipped_runs(tmp_path):
    certificate = certified(
        tmp_path / "run", **{**SOFTMAX, "rounds": 2, "keep_rounds": range(2), "clip_updates": 1e-3}
    )
    assert certificate["last"]["above"] > 0
    assert certificate["last"]["best_round_above_at_most"] is None


DRAWN = {**BRIEF, "active": 2, "lr": 0.02}


class TestWhoseMasksTheyAre:
    """Partial participation needs masks that are independent of the cohort.

    A user's policy may look at the cohort.
    """

    @staticmethod
    def said(found):
        return " ".join(found["bounds"]["partial_participation"]["outside"])

    def test_own_policy_may_depend_on_the_client(self, tmp_path):
        def mine(view):
            return [windows(view.groups, 0.5 if client.id % 2 else 1.0) for client in view.cohort]

        certificate = certified(tmp_path / "run", {"policy": mine}, **DRAWN)
        assert self.said(certificate) == "a policy of your own may give masks by who a client is"
        assert not certificate["bounds"]["partial_participation"]["genuine"]
        assert certificate["bounds"]["reshuffled"]["genuine"]  # it holds for any masks

    @pytest.mark.parametrize(
        "policy", [POLICIES["prefix"], POLICIES["rolling"].with_options(spread=True)]
    )
    def test_table_policy_given_in_python_is_recognised(self, policy, tmp_path):
        certificate = certified(tmp_path / "run", {"policy": policy}, **DRAWN)
        assert certificate["bounds"]["partial_participation"]["genuine"]

    def test_table_policy_is_called_by_its_name(self, tmp_path):
        certificate = certified(tmp_path / "run", {"policy": POLICIES["exclude"]}, **DRAWN)
        assert self.said(certificate) == "policy exclude may give masks by who a client is"


def test_certify_without_kept_rounds_names_keep_rounds(tmp_path):
    fields = {"clients": 4, "active": 2, "epochs": 1}
    with pytest.raises(
        RunError, match=r"run it again with keep_rounds, such as --set 'keep_rounds=\[0, 1\]'"
    ):
        certified(tmp_path / "run", rounds=2, **fields)
    with pytest.raises(
        RunError, match="keeps no round that could be replayed"
    ):  # after the last there is none
        certified(tmp_path / "other", rounds=2, keep_rounds=[2], **fields)
    with pytest.raises(InvalidValue, match="steps must be at least 1; got 0"):
        fc.certify(tmp_path / "run", steps=0)


def test_certify_refuses_models_with_several_exits(tmp_path):
    model, dataset = SMALL_MODELS["depth_resnet"]
    with pytest.raises(RunError, match="several exits"):
        certified(
            tmp_path / "run",
            model=model,
            dataset=dataset,
            recipe="depthfl",
            fleet="1x1.0",
            rounds=1,
            keep_rounds=[0],
            clients=2,
            active=2,
            epochs=1,
            batch_size=4,
            calibration=10,
        )


def test_global_loss_is_the_mean_over_clients():
    setup, state = world("mlp", weight_decay=0.3, weights="samples")
    global_loss = build_global_loss(setup, 100)
    shards = [setup.task.source.shard(client) for client in range(setup.experiment.clients)]
    x = torch.cat([shard.samples.x[shard.index] for shard in shards])
    y = torch.cat([shard.samples.y[shard.index] for shard in shards])
    params = {name: p.clone().requires_grad_() for name, p in state.params.items()}
    logits = torch.func.functional_call(setup.task.model.module, params, (x,))
    loss = torch.nn.functional.cross_entropy(logits, y) + 0.15 * sum(
        p.square().sum() for p in params.values()
    )
    loss.backward()
    full = global_loss.evaluate(state.params, keep=[3])
    assert full.value == pytest.approx(float(loss.detach()))
    assert squared_norm(full.gradient[name] - p.grad for name, p in params.items()) < 1e-20
    client_gradients = global_loss.loss_and_gradient(state.params, global_loss.rows(3))[1]
    gradients = full.client_gradients[3]
    assert squared_norm(gradients[name] - g for name, g in client_gradients.items()) < 1e-20
    each = [
        global_loss.loss_and_gradient(state.params, global_loss.rows(client))[1]
        for client in range(setup.experiment.clients)
    ]
    mean = {name: torch.stack([g[name] for g in each]).mean(0) for name in client_gradients}
    zeta = sum(squared_norm(g[name] - mean[name] for name in mean) for g in each) / len(each)
    assert float(sum(t.sum() for t in full.dissimilarity.values())) == pytest.approx(zeta)


def test_curvature_is_the_largest_eigenvalue_of_the_hessian():
    setup, state = world("softmax", weight_decay=0.3)
    global_loss = build_global_loss(setup, 100)
    shards = [global_loss.rows(client) for client in range(setup.experiment.clients)]
    x, y = torch.cat([s.x for s in shards]).flatten(1), torch.cat([s.y for s in shards])

    def loss(weight, bias):
        return torch.nn.functional.cross_entropy(x @ weight.T + bias, y)

    weight, bias = state.params["head.weight"], state.params["head.bias"]
    blocks = torch.autograd.functional.hessian(loss, (weight, bias))
    sizes = (weight.numel(), bias.numel())
    hessian = torch.cat([torch.cat([b.reshape(n, m) for b, m in zip(row, sizes, strict=True)], 1)
                         for row, n in zip(blocks, sizes, strict=True)])  # fmt: skip
    expected = float(torch.linalg.eigvalsh(hessian)[-1]) + 0.3
    assert global_loss.curvature(state.params, 0) == pytest.approx(expected, rel=0.02)


def test_curvature_of_attention_is_finite():
    setup, state = world("transformer", clients=2000, active=2)
    assert 0 < build_global_loss(setup, 2).curvature(state.params, 0) < 100


def test_minimiser_bounds_enclose_the_optimum():
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hessian = root @ root.T + 0.1 * torch.eye(4, dtype=torch.float64)
    result = minimise(
        lambda x: (float(x @ hessian @ x / 2 + x.sum()), hessian @ x + 1),
        torch.zeros(4).double(),
        0.1,
        3,
    )
    exact = (
        -float(
            torch.ones(4, dtype=torch.float64) @ torch.linalg.solve(hessian, torch.ones(4).double())
        )
        / 2
    )
    assert result.least <= exact <= result.value
