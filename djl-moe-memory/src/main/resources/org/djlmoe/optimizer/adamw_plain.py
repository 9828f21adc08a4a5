def adamw(self, w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, lr: float, beta1: float, beta2: float, epsilon: float, decay: float, divisor: float) -> int:
    if divisor != 1.0:
        g.div_(divisor)
    correction1 = 1.0 - beta1 ** step
    correction2 = 1.0 - beta2 ** step
    w.mul_(1.0 - lr * decay)
    m.lerp_(g, 1.0 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    denominator = torch.sqrt(v).div_(correction2 ** 0.5).add_(epsilon)
    w.addcdiv_(m, denominator, value=-lr / correction1)
    return 0
