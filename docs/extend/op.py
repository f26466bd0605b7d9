"""A new op, softplus(x) = log(1 + exp(x)), with its two kernels: reference, CPU form, CUDA form."""

from pathlib import Path

import numpy as np

import minidl as ml
from minidl import nn, optim
from minidl.autograd.op import Op
from minidl.kernels.cuda import c_type, dense
from minidl.kernels.registry import kernel

SOURCE = str(Path(__file__).resolve().with_name("softplus.cu"))


# The reference defines the result, over NumPy or CuPy. Tests compare every other form with it.
@kernel("softplus", flops=lambda reads, writes: 4.0 * writes[0].size)
def softplus_kernel(xp, x):
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


@kernel("softplus_grad", flops=lambda reads, writes: 3.0 * writes[0].size)
def softplus_grad_kernel(xp, x, dy):
    return dy / (1 + xp.exp(-x))


# The CPU form is bound once to fixed arrays and returns calls without arguments, which allocate nothing.
@softplus_kernel.cpu
def _(x, y):
    return [lambda: np.logaddexp(x, 0, out=y)]


@softplus_grad_kernel.cpu
def _(x, dy, dx):
    return [lambda: np.negative(x, out=dx), lambda: np.exp(dx, out=dx), lambda: np.add(dx, 1, out=dx),
            lambda: np.divide(dy, dx, out=dx)]


# The CUDA form returns launches: source, kernel, arrays. `dense` is for element-wise kernels.
@softplus_kernel.cuda()
def _(x, y):
    return dense(SOURCE, f"softplus<{c_type(x)}>", x, y)


@softplus_grad_kernel.cuda()
def _(x, dy, dx):
    return dense(SOURCE, f"softplus_grad<{c_type(x)}>", x, dy, dx)


# The op makes tasks of the kernels. It does not say when they run, and gets separate output and weight gradients.
class Softplus(Op):
    name = "softplus"

    def forward(self, x):
        self.x = self.dense(x)
        y = self.out(x.shape, x.dtype)
        self.call("softplus", [self.x], [y])
        return y

    def input_grad(self, i, dy):
        dx = self.grad(self.x)
        self.call("softplus_grad", [self.x, self.dense(dy)], [dx])
        return dx


def softplus(x):
    return Softplus()(x)


if __name__ == "__main__":
    layer = nn.Linear(8, 3)
    opt = optim.SGD(layer.parameters(), lr=0.1)

    def step(x, y):
        loss = nn.cross_entropy(softplus(layer(x)), y)
        loss.backward()
        opt.step()
        return loss

    x, y = np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32), np.array([0, 1, 2, 0])
    graph = ml.record(step, x, y)
    print(ml.plan(graph, "multi_stream").schedule.grid())
    run = ml.StreamExecutor(graph, ml.schedulers.multi_stream(graph))
    losses = [float(run(x, y)) for _ in range(20)]
    assert losses[-1] < losses[0]
