"""What a consumer of the weights has: the autoencoder's class, as plain torch, with nothing of retraind."""

from torch import Tensor, nn


def _half(first: int, second: int, hidden: int = 24) -> list[nn.Module]:
    return [nn.Linear(first, hidden), nn.BatchNorm1d(hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, second)]


class TelemetryAutoencoder(nn.Module):
    """input_dim - 24 - latent_dim - 24 - input_dim."""

    def __init__(self, input_dim: int = 32, latent_dim: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*_half(input_dim, latent_dim), nn.LeakyReLU(0.2))
        self.decoder = nn.Sequential(*_half(latent_dim, input_dim))

    def forward(self, x_BD: Tensor) -> Tensor:  # noqa: N803  (B batch, D metrics)
        return self.decoder(self.encoder(x_BD))
