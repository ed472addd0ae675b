"""Models over text: heads, hidden units and embeddings are cut, and they learn all the same."""

import math

import pytest
import torch

import fedcover as fc
from fedcover.data.datasets import load
from fedcover.errors import InvalidValue

SMALL = "transformer(width=32, heads=4, blocks=1, hidden=32)"


def test_text_is_cut_into_shifted_sequences():
    data = load("characters")
    assert data.train.x.shape[1:] == data.train.y.shape[1:] == (64,)
    assert torch.equal(data.train.x[0, 1:], data.train.y[0, :-1])
    assert int(data.train.x.max()) < data.classes == 128
    assert data.owner is not None
    assert len(data.owner) == len(data.train)
    assert len(data.owner.unique()) == int(data.owner.max()) + 1


@pytest.mark.parametrize("policy", ["prefix", "rolling", "random"])
def test_transformer_learns_under_every_policy(policy):
    topics = int(load("characters").owner.max()) + 1
    run = fc.run(
        fc.Experiment(
            dataset="characters",
            partition="owner",
            clients=topics,
            active=8,
            model=SMALL,
            policy=policy,
            fleet="1x1.0 + 1x0.5",
            rounds=2,
            epochs=1,
            lr=0.5,
            clip=1.0,
        )
    )
    assert run.summary["loss"] < 0.8 * math.log(128)
    assert run.summary["accuracy"] > 0.1


def test_half_transformer_has_half_of_heads_and_stream():
    run = fc.run(
        fc.Experiment(
            dataset="characters",
            clients=700,
            active=1,
            rounds=1,
            epochs=1,
            model=SMALL,
            policy="prefix",
        )
    )
    part = run.submodel(0.5)
    assert part.characters.weight.shape == (128, 16)
    assert part.blocks[0].attention.qkv.weight.shape == (3 * 16, 16)
    assert part(torch.zeros(2, 64, dtype=torch.int64)).shape == (2, 128, 64)


def counting(rows=300, length=9, symbols=7, every=True):
    """A text whose next symbol is one or two more than the last, the same step throughout
    a line.
    """
    draws = torch.Generator().manual_seed(0)
    first, step = (
        torch.randint(symbols, (rows, 1), generator=draws),
        torch.randint(1, 3, (rows, 1), generator=draws),
    )
    line = (first + step * torch.arange(length + 1)) % symbols
    samples = fc.Samples(line[:, :-1], line[:, 1:] if every else line[:, -1])
    train, test = (
        fc.Samples(samples.x[part], samples.y[part]) for part in (slice(0, 200), slice(200, None))
    )
    return fc.Dataset("counting", train, test, classes=symbols)


@pytest.mark.parametrize("policy", ["prefix", "rolling", "random", "planned"])
@pytest.mark.parametrize("labels", ["every", "last"])
def test_recurrent_model_learns_generated_text(labels, policy):
    """By guessing it would be right in a seventh; the last symbol alone tells a half."""
    fields = {
        "clients": 10,
        "active": 5,
        "rounds": 6,
        "epochs": 4,
        "lr": 1.0,
        "clip": 1.0,
        "window": 2,
    }
    model = f"lstm(embedding=6, hidden=24, layers=1, labels={labels})"
    experiment = fc.Experiment(
        model=model, policy=policy, fleet="1x1.0 + 1x0.5", batch_size=5, **fields
    )
    run = fc.run(experiment, dataset=counting(every=labels == "every"))
    assert run.summary["accuracy"] > 0.6
    part = run.submodel(0.5)
    assert (part.lstm.hidden_size, part.embedding.embedding_dim) == (12, 3)


def test_inputs_and_labels_may_have_different_vocabularies():
    data = counting()
    few = fc.Dataset(
        "parity", *(fc.Samples(s.x, s.y[:, -1] % 2) for s in (data.train, data.test)), classes=2
    )
    model = "lstm(hidden=8, labels=last, vocabulary=7)"
    run = fc.run(fc.Experiment(model=model, clients=10, active=2, rounds=1, epochs=1), dataset=few)
    assert run.model().embedding.weight.shape == (7, 8)


@pytest.mark.parametrize(
    "options", ["hidden=0", "embedding=-1", "layers=0", "vocabulary=0", "labels=first"]
)
def test_recurrent_model_refuses_wrong_options(options):
    with pytest.raises(InvalidValue, match=f"^model lstm: {options.partition('=')[0]} must be"):
        fc.run(fc.Experiment(model=f"lstm({options})", dataset="characters", clients=700))
