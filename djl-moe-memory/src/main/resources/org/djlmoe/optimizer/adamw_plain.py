def adamw(self, w: List[Tensor], g: List[Tensor], m: List[Tensor], v: List[Tensor], step: List[int], lr: float, beta1: float, beta2: float, epsilon: float, decay: float, divisor: float) -> int:
    for i in range(len(w)):
        if divisor != 1.0:
            g[i].div_(divisor)
        correction1 = 1.0 - beta1 ** step[i]
        correction2 = 1.0 - beta2 ** step[i]
        w[i].mul_(1.0 - lr * decay)
        m[i].lerp_(g[i], 1.0 - beta1)
        v[i].mul_(beta2).addcmul_(g[i], g[i], value=1.0 - beta2)
        denominator = torch.sqrt(v[i]).div_(correction2 ** 0.5).add_(epsilon)
        w[i].addcdiv_(m[i], denominator, value=-lr / correction1)
    return 0
