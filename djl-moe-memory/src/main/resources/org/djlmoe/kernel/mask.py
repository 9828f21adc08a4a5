# Gradients of an expert mask that is learnt straight through: the combine weight of expert e carries a factor m_e, of
# value 1 where e is kept and 0 where it is dropped, before the weights of a row are divided by their sum (if they are).

# Adds d loss / d m_e of the chosen experts to sums [E] (F64). With the division a row gives w (dw - <w, dw>), otherwise
# w dw. Experts that no row has chosen get exactly nothing.
def mask_gradient(self, ids: Tensor, combine: Tensor, dcombine: Tensor, renormalize: bool, sums: Tensor) -> int:
    dw = dcombine - (combine * dcombine).sum(1, True) if renormalize else dcombine
    sums.index_add_(0, ids.reshape(-1), (combine * dw).reshape(-1).to(dtype=7))
    return 0

# The same for the `extra` best experts among those that bias [E] forbids with -inf: they run on their rows though they
# take no part in y, to learn what they would have added. Scratch as for experts_backward.
def excluded_gradient(self, x: Tensor, g: Tensor, weights: List[Tensor], eps: float, scale: float, bias: Tensor, outside: Tensor, extra: int, renormalize: bool, ids: Tensor, combine: Tensor, dcombine: Tensor, block: int, wide: Tensor, half: Tensor, sums: Tensor) -> int:
    hidden = x.size(1)
    experts = weights[2].size(0)
    best = torch.empty([x.size(0), extra], dtype=4, device=x.device)
    w = torch.empty([x.size(0), extra], dtype=x.dtype, device=x.device)
    for first in range(0, x.size(0), block):
        last = min(x.size(0), first + block)
        h = self.norm_block(x[first:last], weights[0], eps, self.block_rows(wide, block, 0, last - first, hidden))
        logits = torch.mm(h, weights[1].t())
        s, ranked = torch.sort(logits.masked_fill(torch.isfinite(bias), -inf), stable=True, dim=-1, descending=True)
        best[first:last].copy_(ranked[:, :extra])
        # The weight that the expert would have with factor 1, the other weights as they are.
        within = logits.gather(1, ids[first:last]) if renormalize else self.inside(logits, outside)
        w[first:last].copy_(torch.exp(logits.gather(1, best[first:last]) - torch.logsumexp(within, 1, True)))
    order, counts = self.group_routes(best, experts)
    token = torch.floor_divide(order, extra)
    one = torch.ones([block, 1], dtype=x.dtype, device=x.device)
    before = weights[3].size(2) * 5 + self.rank(weights)
    grouped = torch.empty([order.size(0)], dtype=x.dtype, device=x.device)
    first = 0
    for e in range(experts):
        for a, b in self.pieces(first, counts[e], block):
            rows = self.block_rows(wide, block, before, b - a, hidden)
            torch.index_select(x, 0, token[a:b], out=rows)
            self.norm_block(rows, weights[0], eps, rows)
            self.block_forward(rows, one[:b - a], e, weights, scale, block, wide, half)
            gs = self.block_rows(wide, block, before + hidden, b - a, hidden)
            torch.index_select(g, 0, token[a:b], out=gs)
            torch.sum(rows.mul_(gs), [1], out=grouped[a:b])
        first += counts[e]
    dw = torch.empty_like(grouped).index_copy_(0, order, grouped).reshape([-1, extra])
    if renormalize:
        dw = dw - (combine * dcombine).sum(1, True)
    sums.index_add_(0, best.reshape(-1), (w * dw).reshape(-1).to(dtype=7))
    return 0

# theta's gradient [E] += slopes * sums
def mask_logits_gradient(self, sums: Tensor, slopes: Tensor, gradient: Tensor) -> int:
    gradient.add_((sums * slopes).to(dtype=6))
    return 0
