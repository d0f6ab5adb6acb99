"""Gradients are clipped by hooks of the parameters of before `parallelize`.

error: ParameterHookError
says: 'norm.weight' of Net has gradient hooks | Call parallelize first
"""

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
parallelize(model, plan(mesh))
model(inputs()).sum().backward()
