"""Feed-forward and convolutional networks in plain PyTorch, as torchvision writes them.

They take our weights as `torch_models` does; images are [B, C, H, W], and `forward` is the mean
loss.
"""

import re

import torch
from torch import nn
from torch.nn import functional

from benchmarks.torch_models import Weights, fill, make_linear


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.layers = make_layers(weights, "layers", "head")

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(inputs), targets)


class Autoencoder(nn.Module):
    """An MLP to a code, another one back, and the mean squared error of a sigmoid."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.encoder = make_layers(weights, "encoder")
        self.decoder = make_layers(weights, "decoder", "head")

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        del targets  # the inputs are
        return functional.mse_loss(torch.sigmoid(self.decoder(self.encoder(inputs))), inputs)


def make_layers(weights: Weights, stem: str, *last: str) -> nn.Sequential:
    """The linear layers "stem.0", "stem.1" and so on, then the last ones; ReLU between them."""
    count = sum(name.startswith(f"{stem}.") and name.endswith(".weight") for name in weights)
    layers: list[nn.Module] = []
    for name in (*(f"{stem}.{i}" for i in range(count)), *last):
        layers += [nn.ReLU(), make_linear(weights, name)]
    return nn.Sequential(*layers[1:])


class Normed(nn.Module):
    """A convolution and its batch norm."""

    def __init__(self, weights: Weights, path: str, stride: int) -> None:
        super().__init__()
        kernel = weights[f"{path}.kernel"].transpose(3, 2, 0, 1)
        channels_out, channels_in, size, _ = kernel.shape
        self.convolution = nn.Conv2d(channels_in, channels_out, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)
        fill(self.convolution.weight, kernel)
        fill(self.norm.weight, weights[f"{path}.scale"])
        fill(self.norm.bias, weights[f"{path}.bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x))


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, weights: Weights, path: str, stride: int) -> None:
        super().__init__()
        self.first = Normed(weights, f"{path}.convolutions.0", stride)
        self.second = Normed(weights, f"{path}.convolutions.1", 1)
        self.shortcut: nn.Module = nn.Identity()
        if f"{path}.shortcut.kernel" in weights:
            self.shortcut = Normed(weights, f"{path}.shortcut", stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """Basic blocks in the form for CIFAR, or with a stem of 7 x 7 pixels in that for ImageNet.

    `forward` is the mean loss of labels.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.for_imagenet = len(weights["stem.kernel"]) == 7
        self.stem = Normed(weights, "stem", 2 if self.for_imagenet else 1)
        paths = sorted({".".join(name.split(".")[:2]) for name in weights if "blocks." in name})
        # In both forms a shortcut has weights where the stride is 2.
        strides = {path: 2 if f"{path}.shortcut.kernel" in weights else 1 for path in paths}
        paths.sort(key=_in_order)
        self.blocks = nn.Sequential(*(BasicBlock(weights, path, strides[path]) for path in paths))
        self.head = nn.Linear(*weights["head"].shape)
        fill(self.head.weight, weights["head"].T)
        fill(self.head.bias, weights["head_bias"])

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.stem(inputs))
        if self.for_imagenet:
            x = functional.max_pool2d(x, 3, 2, 1)
        x = self.blocks(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), targets)


class ConvNet(nn.Module):
    """Convolutions and poolings, then fully connected layers; `forward` is the mean loss of labels.

    Args:
      weights: ours, by name.
      parts: words of one letter and numbers: "c4.2" is a convolution of stride 4 with 2 pixels of
        padding, followed by the activation; "m3.2" and "a2.2" take the largest and the mean of 3
        x 3 and 2 x 2 pixels at a stride of 2; a third number is the padding in pixels.
      side: pixels of a side before the fully connected layers, by adaptive average pooling.
      activation: a function of `torch`.
    """

    def __init__(self, weights: Weights, parts: str, side: int, activation: str = "relu") -> None:
        super().__init__()
        self.act, self.side, layers = getattr(torch, activation), side, []
        names = sorted({name.rpartition(".")[0] for name in weights}, key=_in_order)
        convolutions = (name for name in names if re.fullmatch(r"convolutions\.\d+", name))
        for part in parts.split():
            numbers = [int(number) for number in part[1:].split(".")]
            if part[0] == "c":
                layers.append(self._convolution(weights, next(convolutions), *numbers))
            else:
                pool = nn.MaxPool2d if part[0] == "m" else nn.AvgPool2d
                layers.append(pool(*numbers))
        self.parts = nn.ModuleList(layers)
        dense = [name for name in names if name.startswith("dense")]
        self.dense = nn.ModuleList(make_linear(weights, name) for name in (*dense, "head"))

    def _convolution(self, weights: Weights, name: str, stride: int, padding: int) -> nn.Module:
        kernel = weights[f"{name}.weight"].transpose(3, 2, 0, 1)
        channels_out, channels_in, size, _ = kernel.shape
        convolution = nn.Conv2d(channels_in, channels_out, size, stride, padding)
        fill(convolution.weight, kernel)
        fill(convolution.bias, weights[f"{name}.bias"])
        if f"{name}.norm.scale" not in weights:
            return convolution
        norm = nn.BatchNorm2d(channels_out)
        fill(norm.weight, weights[f"{name}.norm.scale"])
        fill(norm.bias, weights[f"{name}.norm.bias"])
        return nn.Sequential(convolution, norm)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = inputs
        for part in self.parts:
            pools = isinstance(part, nn.MaxPool2d | nn.AvgPool2d)
            x = part(x) if pools else self.act(part(x))
        if x.shape[2:] != (self.side, self.side):
            x = functional.adaptive_avg_pool2d(x, self.side)
        x = x.permute(0, 2, 3, 1).flatten(1)
        for i, layer in enumerate(self.dense):
            x = layer(self.act(x) if i else x)
        return functional.cross_entropy(x, targets)


class Inception(nn.Module):
    """Convolutions of 1x1, 3x3 and 5x5 pixels and a pooling, side by side."""

    def __init__(self, weights: Weights, path: str) -> None:
        super().__init__()
        self.all = nn.ModuleList([BasicConv2d(weights, f"{path}.all.{i}", 1) for i in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, before_three, three, before_five, five, after_pool = self.all
        pooled = functional.max_pool2d(x, 3, 1, 1)
        branches = one(x), three(before_three(x)), five(before_five(x)), after_pool(pooled)
        return torch.cat(branches, 1)


class BasicConv2d(nn.Module):
    """A convolution, a batch norm and ReLU; our bias before the norm is left out, being zero."""

    def __init__(self, weights: Weights, path: str, stride: int) -> None:
        super().__init__()
        kernel = weights[f"{path}.weight"].transpose(3, 2, 0, 1)
        channels_out, channels_in, size, _ = kernel.shape
        self.conv = nn.Conv2d(channels_in, channels_out, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out, eps=1e-3)
        fill(self.conv.weight, kernel)
        fill(self.norm.weight, weights[f"{path}.norm.scale"])
        fill(self.norm.bias, weights[f"{path}.norm.bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.norm(self.conv(x)), inplace=True)


class InceptionAux(nn.Module):
    """An auxiliary head."""

    def __init__(self, weights: Weights, path: str) -> None:
        super().__init__()
        self.conv = BasicConv2d(weights, f"{path}.convolution", 1)
        self.dense, self.out = (make_linear(weights, f"{path}.{one}") for one in ("dense", "out"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(functional.adaptive_avg_pool2d(x, 4))
        # Our order of what is flattened is [H, W, C].
        x = x.permute(0, 2, 3, 1).flatten(1)
        return self.out(functional.relu(self.dense(x)))


class GoogLeNet(nn.Module):
    """With batch norms and without dropout; `forward` is the mean loss of all three heads."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.stem = nn.ModuleList(
            [BasicConv2d(weights, f"stem.{i}", 2 if i == 0 else 1) for i in range(3)]
        )
        self.inception = nn.ModuleList([Inception(weights, f"modules.{i}") for i in range(9)])
        self.aux = nn.ModuleList([InceptionAux(weights, f"heads.{i}") for i in range(2)])
        self.head = make_linear(weights, "head")

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first, second, third = self.stem
        x = third(second(self._pool(first(inputs))))
        logits = []
        for i, module in enumerate(self.inception):
            # Before 3a, 4a and 5a.
            x = module(self._pool(x) if i in (0, 2, 7) else x)
            if i in (2, 5):
                logits.append(self.aux[len(logits)](x))
        losses = [functional.cross_entropy(each, targets) for each in logits]
        loss = functional.cross_entropy(self.head(x.mean((2, 3))), targets)
        return loss + 0.3 * (losses[0] + losses[1])

    def _pool(self, x: torch.Tensor) -> torch.Tensor:
        return functional.max_pool2d(x, 3, 2, ceil_mode=True)


def _in_order(name: str) -> list[tuple[int, str]]:
    """ "convolutions.10" after "convolutions.9"."""
    return [(int(word) if word.isdigit() else -1, word) for word in name.split(".")]


_VGG11 = "c1.1 m2.2 c1.1 m2.2 c1.1 c1.1 m2.2 c1.1 c1.1 m2.2 c1.1 c1.1 m2.2"


def make_lenet(weights: Weights) -> nn.Module:
    """LeNet with max pooling and ReLU, for images of 32 x 32 pixels."""
    return ConvNet(weights, "c1.0 m2.2 c1.0 m2.2", 5)


def make_alexnet(weights: Weights) -> nn.Module:
    """AlexNet without dropout."""
    return ConvNet(weights, "c4.2 m3.2 c1.2 m3.2 c1.1 c1.1 c1.1 m3.2", 6)


def make_vgg11(weights: Weights) -> nn.Module:
    """VGG-11 without dropout, with batch norms where our weights have them."""
    return ConvNet(weights, _VGG11, 7)
