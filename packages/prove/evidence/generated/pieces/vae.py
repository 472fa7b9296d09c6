# Noise in the model: a variational autoencoder.

# %% from samples
# %% choices
model = "vae"
loss = "vae"
# %% facts
draws = True


# %% classes
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(3, 6)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        code = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


# %% build
net = Net()

# %% forward
copied, mean, log_variance = model(x)
divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
loss = F.mse_loss(copied, x) + 0.01 * divergence.mean()
