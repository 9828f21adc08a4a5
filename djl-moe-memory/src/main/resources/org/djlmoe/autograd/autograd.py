# A small y may be an array of Java values: its memory is Java's, and goes with the array object.
def anchor(self, y: Tensor) -> Tuple[Tensor, Tensor]:
    leaf = torch.zeros(annotate(List[int], []), dtype=y.dtype, device=y.device).expand(y.size()).detach().requires_grad_(True)
    out = y.detach()
    if y.numel() <= 1024:
        out = out.clone()
    out.add_(leaf)
    return (out, leaf)

def release(self, g: Tensor) -> int:
    torch.set_(g, torch.empty([0], dtype=g.dtype, device=g.device))
    return 0
