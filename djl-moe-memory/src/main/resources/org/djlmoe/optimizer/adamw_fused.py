def adamw(self, w: List[Tensor], g: List[Tensor], m: List[Tensor], v: List[Tensor], step: List[int], lr: float, beta1: float, beta2: float, epsilon: float, decay: float, divisor: float) -> int:
    steps = annotate(List[Tensor], [])
    for i in range(len(step)):
        steps.append(torch.tensor(float(step[i]), dtype=6, device=w[i].device))
    none = annotate(List[Tensor], [])
    if divisor == 1.0:
        torch._fused_adamw_(w, g, m, v, none, steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=epsilon, amsgrad=False, maximize=False)
    else:
        torch._fused_adamw_(w, g, m, v, none, steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=epsilon, amsgrad=False, maximize=False, grad_scale=torch.tensor(divisor, dtype=6, device=w[0].device))
    return 0
