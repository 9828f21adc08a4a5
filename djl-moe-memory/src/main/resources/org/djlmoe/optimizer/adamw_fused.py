# Not the literal [x]: PyTorch takes an update of its elements for dead code and leaves it out.
def listed(self, x: Tensor) -> List[Tensor]:
    out = annotate(List[Tensor], [])
    out.append(x)
    return out

def adamw(self, w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, lr: float, beta1: float, beta2: float, epsilon: float, decay: float, divisor: float) -> int:
    none = annotate(List[Tensor], [])
    count = torch.tensor(float(step), dtype=6, device=w.device)
    scale = annotate(Optional[Tensor], None)
    if divisor != 1.0:
        scale = torch.tensor(divisor, dtype=6, device=w.device)
    torch._fused_adamw_(self.listed(w), self.listed(g), self.listed(m), self.listed(v), none, self.listed(count), lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=epsilon, amsgrad=False, maximize=False, grad_scale=scale)
    return 0
