# Complex parameters.

# %% from samples
# %% choices
model = ("fourier", "complex layers")
# %% from classification
# %% facts
layout = "complex"


# %% classes, if model is fourier
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        real, imaginary = torch.empty(2, 4, 4).normal_()
        self.weight = nn.Parameter(torch.complex(real, imaginary) / 4)
        self.output = nn.Linear(8, 3)

    def forward(self, x):
        waves = torch.fft.rfft(x, norm="ortho") @ self.weight
        return self.output(torch.view_as_real(waves * torch.sigmoid(waves.abs())).flatten(1))


# %% classes, if model is complex layers
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        dtype = torch.get_default_dtype().to_complex()
        self.first = nn.Linear(6, 8, dtype=dtype)
        self.last = nn.Linear(8, 3, dtype=dtype)

    def forward(self, x):
        hidden = self.first(x.to(self.first.weight.dtype))
        return self.last(hidden * torch.sigmoid(hidden.abs())).real


# %% build
net = Net()
