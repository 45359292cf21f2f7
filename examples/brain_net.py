"""The net of `brain_mri.py`: layers of 3-D windowed attention and of an MLP, gradients by hand.

Each layer adds to x: first attention of the normalised x over a window in space (left out in the
baseline), then an MLP of two products. What a cube says at the end is a small linear rule: a score
for each lobe from a voxel's place in the cube and how bright it and its neighbours are. So the net
finds out which lobes are about, and edges within a cube follow the picture. One `xp`, NumPy or
CuPy, runs it.
"""

from typing import Any

import numpy as np
from brain_volume import cubes, smooth

import cuflash

LOBES = 8  # background and seven
RULE = 8  # numbers a voxel brings: 1, its place in the cube, two brightnesses and their squares


def normalise(xp: Any, x: Any) -> tuple[Any, Any]:
    """Rows of mean square 1, and 1 / root mean square of each."""
    scale = 1 / xp.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
    return x * scale, scale


def normalise_backward(dy: Any, y: Any, scale: Any) -> Any:
    return scale * (dy - y * (dy * y).mean(axis=1, keepdims=True))


class Net:
    """A volume in, scores of the lobes for each voxel out; tokens are cubes in tile order.

    Parameters
    ----------
    size : the table SMALL or FULL of `brain_mri.py`
    told : whether a cube is told where in the field of view it lies
    attend : whether the attention of each layer takes part
    """

    def __init__(self, xp: Any, size: dict[str, Any], seed: int, told: bool, attend: bool) -> None:
        self.xp, self.size, self.attend = xp, size, attend
        self.shape = tuple(n // size["patch"] for n in size["grid"])  # of the grid of tokens
        self.order = cuflash.order.tiles(self.shape, size["tile"])
        self.mask = cuflash.Neighborhood(self.shape, size["window"], edge="clip")
        rng, width, voxels = np.random.default_rng(seed), size["width"], size["patch"] ** 3

        at = np.stack(np.unravel_index(self.order.positions, self.shape), axis=1)
        at = np.pi * ((2 * at + 1) / np.array(self.shape) - 1)  # -pi to pi in the field of view
        place = np.concatenate([at, np.sin(at), np.cos(at), np.sin(2 * at), np.cos(2 * at)], axis=1)
        self.place = xp.asarray(2 * told * place, np.float32)
        inside = (np.indices(3 * (size["patch"],)).reshape(3, -1).T + 0.5) / size["patch"]
        self.inside = xp.asarray(2 * inside - 1, np.float32)  # (voxels of a cube, 3)

        def normal(rows: int, columns: int) -> Any:
            values = rng.standard_normal((rows, columns)) / rows**0.5
            return xp.asarray(values, np.float32)

        w = {"in": normal(voxels + place.shape[1], width), "in_bias": xp.zeros(width, np.float32)}
        w |= {"out": 0 * normal(width, RULE * LOBES)}
        w |= {"out_bias": xp.zeros(RULE * LOBES, np.float32)}
        self.scores = []
        for layer in range(size["layers"]):
            w[f"up{layer}"], w[f"down{layer}"] = normal(width, 4 * width), normal(4 * width, width)
            if attend:
                w[f"qkv{layer}"], w[f"mix{layer}"] = normal(width, 3 * width), normal(width, width)
                offsets = (2 * (n // 2) + 1 for n in size["window"])
                w[f"bias{layer}"] = xp.zeros((size["heads"], *offsets), np.float32)
                param = cuflash.Param(w[f"bias{layer}"])  # Adam changes in place what it holds
                self.scores.append((param, cuflash.RelativeBias(param, self.shape)))
        self.weights = w

    def voxels(self, image: Any) -> Any:
        """What the rules weigh: (tokens, patch^3, RULE)."""
        xp, patch = self.xp, self.size["patch"]
        own, near = (cubes(x, patch, self.order) for x in (image, smooth(xp, image)))
        own, near = 2 * own - 1, 2 * near - 1
        inside = [xp.broadcast_to(self.inside[:, i], own.shape) for i in range(3)]
        columns = [xp.ones_like(own), *inside, own, own * own, near, near * near]
        return xp.stack(columns, axis=2)

    def forward(self, image: Any) -> tuple[Any, list[Any]]:
        """Scores (tokens, patch^3, LOBES) of a volume, and what backward needs."""
        xp, w = self.xp, self.weights
        voxels = self.voxels(image)
        tokens = xp.concatenate([cubes(image, self.size["patch"], self.order), self.place], axis=1)
        n = len(tokens)
        x, tape = tokens @ w["in"] + w["in_bias"], [voxels, tokens]
        for layer in range(self.size["layers"]):
            if self.attend:
                y, scale = normalise(xp, x)
                qkv = (y @ w[f"qkv{layer}"]).reshape(n, 3, self.size["heads"], -1)
                o, pullback = cuflash.attention_vjp(
                    *(qkv[:, i] for i in range(3)),
                    mask=self.mask,
                    score=self.scores[layer][1],
                    positions=self.order.positions,
                )
                x = x + o.reshape(n, -1) @ w[f"mix{layer}"]
                tape.append((y, scale, o, pullback))
            y, scale = normalise(xp, x)
            hidden = xp.maximum(y @ w[f"up{layer}"], 0)
            x = x + hidden @ w[f"down{layer}"]
            tape.append((y, scale, hidden))
        y, scale = normalise(xp, x)
        tape.append((y, scale))
        rules = (y @ w["out"] + w["out_bias"]).reshape(n, RULE, LOBES)
        return voxels @ rules, tape

    def backward(self, dscores: Any, tape: list[Any]) -> dict[str, Any]:
        """The gradient by every weight: the chain rule, from the last line to the first."""
        xp, w, n, voxels = self.xp, self.weights, len(dscores), tape.pop(0)
        y, scale = tape.pop()
        drules = (voxels.swapaxes(1, 2) @ dscores).reshape(n, -1)
        g = {"out": y.T @ drules, "out_bias": drules.sum(axis=0)}
        dx = normalise_backward(drules @ w["out"].T, y, scale)
        for layer in reversed(range(self.size["layers"])):
            y, scale, hidden = tape.pop()
            g[f"down{layer}"] = hidden.T @ dx
            dhidden = (dx @ w[f"down{layer}"].T) * (hidden > 0)
            g[f"up{layer}"] = y.T @ dhidden
            dx = dx + normalise_backward(dhidden @ w[f"up{layer}"].T, y, scale)
            if self.attend:
                y, scale, o, pullback = tape.pop()
                g[f"mix{layer}"] = o.reshape(n, -1).T @ dx
                grads = pullback((dx @ w[f"mix{layer}"].T).reshape(o.shape))
                g[f"bias{layer}"] = grads.dparams[self.scores[layer][0]]
                dqkv = xp.stack(list(grads), axis=1).reshape(n, -1)
                g[f"qkv{layer}"] = y.T @ dqkv
                dx = dx + normalise_backward(dqkv @ w[f"qkv{layer}"].T, y, scale)
        g["in"], g["in_bias"] = tape.pop().T @ dx, dx.sum(axis=0)
        return g


class Adam:
    """Adam with a short warm-up, a cosine decay and gradients of norm at most 1."""

    def __init__(self, xp: Any, weights: dict[str, Any], steps: int, rate: float) -> None:
        self.xp, self.weights, self.steps, self.rate, self.count = xp, weights, steps, rate, 0
        self.mean = {name: xp.zeros_like(weight) for name, weight in weights.items()}
        self.square = {name: xp.zeros_like(weight) for name, weight in weights.items()}

    def step(self, gradients: dict[str, Any]) -> None:
        xp, self.count = self.xp, self.count + 1
        rate = self.rate * min(1.0, self.count / 10)
        rate *= 0.5 + 0.5 * np.cos(np.pi * self.count / self.steps)
        total = sum((each * each).sum() for each in gradients.values())
        clip = xp.minimum(1, 1 / xp.sqrt(total))
        for name, gradient in gradients.items():
            gradient, mean, square = gradient * clip, self.mean[name], self.square[name]
            mean += 0.1 * (gradient - mean)
            square += 0.02 * (gradient * gradient - square)
            size = xp.sqrt(square / (1 - 0.98**self.count)) + 1e-8
            self.weights[name] -= rate * (mean / (1 - 0.9**self.count)) / size
