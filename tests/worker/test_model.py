"""The architecture, its names, and its bytes."""

import io

import pytest
import torch
from torch import nn

from retraind.worker import model


class ConsumersAutoencoder(nn.Module):
    """The class that a consumer of the weights has, who does not know retraind."""

    def __init__(self, input_dim=32, latent_dim=8):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(input_dim, 24),
            nn.BatchNorm1d(24),
            nn.LeakyReLU(0.2),
            nn.Linear(24, latent_dim),
            nn.LeakyReLU(0.2),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent_dim, 24), nn.BatchNorm1d(24), nn.LeakyReLU(0.2), nn.Linear(24, input_dim)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


@pytest.mark.parametrize("input_dim", [1, 32, 700])
def test_a_consumers_class_loads_the_bytes_and_answers_alike(input_dim):
    ours = model.build(input_dim, seed=3).eval()
    theirs = ConsumersAutoencoder(input_dim)
    theirs.load_state_dict(torch.load(io.BytesIO(model.serialise(ours)), weights_only=True), strict=True)
    x = torch.randn(5, input_dim, generator=torch.Generator().manual_seed(1))
    assert torch.equal(theirs.eval()(x), ours(x))


def test_the_weights_depend_on_the_seed_alone():
    torch.manual_seed(99)
    first = model.serialise(model.build(32, seed=5))
    torch.rand(7)
    assert model.serialise(model.build(32, seed=5)) == first
    assert model.serialise(model.build(32, seed=6)) != first


def test_building_leaves_the_global_generator_where_it_was():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    model.build(32, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_the_expected_tensors_are_those_of_the_consumers_class():
    facts = {fact.name: fact for fact in model.expected_tensors(32)}
    state = ConsumersAutoencoder().state_dict()
    assert list(facts) == list(state)
    assert {name: fact.shape for name, fact in facts.items()} == {n: list(t.shape) for n, t in state.items()}
    assert facts["encoder.0.weight"].shape == [24, 32]
    assert facts["encoder.1.num_batches_tracked"].dtype == "int64"
    assert all(fact.is_finite for fact in facts.values())


@pytest.mark.parametrize("name", ["decoder.3.bias", "encoder.1.running_var"])
def test_a_tensor_that_is_not_finite_is_named(name):
    state = model.build(4, seed=0).state_dict()
    state[name][1] = float("inf")
    assert [fact.name for fact in model.tensor_facts(state) if not fact.is_finite] == [name]
