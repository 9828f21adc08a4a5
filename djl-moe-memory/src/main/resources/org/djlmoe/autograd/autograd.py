# A small y may be an array of Java values: its memory is Java's, and goes with the array object.
def anchor(self, y: Tensor) -> Tuple[Tensor, Tensor]:
    leaf = torch.zeros(annotate(List[int], []), dtype=y.dtype, device=y.device).expand(y.size()).detach().requires_grad_(True)
    out = y.detach()
    if y.numel() <= 1024:
        out = out.clone()
    out.add_(leaf)
    return (out, leaf)

# An empty gradient refuses later ones by its size; a single number would be added to it without a word.
def release(self, g: Tensor) -> int:
    if g.numel() == 1:
        g.zero_()
        return 0
    torch.set_(g, torch.empty([0], dtype=g.dtype, device=g.device))
    return 0

def is_late(self, g: Tensor) -> bool:
    if g.numel() != 1:
        return g.numel() > 1
    return annotate(float, g.sum().item()) != 0.0
