"""What a training step does with gradients and parameters, on any mesh: for now the clipping of gradients."""

from vescale.optim._clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"]
