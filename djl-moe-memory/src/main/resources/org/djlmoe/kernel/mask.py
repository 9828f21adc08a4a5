# Gradients of an expert mask that is learnt straight through: the combine weight of expert e carries a factor m_e, of
# value 1 where e is kept and 0 where it is dropped, before the weights of a row are divided by their sum (if they are).

# Adds d loss / d m_e of the chosen experts to sums [E] (F64). With the division a row gives w (dw - <w, dw>), otherwise
# w dw. Experts that no row has chosen get exactly nothing.
def mask_gradient(self, ids: Tensor, combine: Tensor, dcombine: Tensor, renormalize: bool, sums: Tensor) -> int:
    dw = dcombine - (combine * dcombine).sum(1, True) if renormalize else dcombine
    sums.index_add_(0, ids.reshape(-1), (combine * dw).reshape(-1).to(dtype=7))
    return 0

# The same for the `extra` best experts among those that bias [E] forbids with -inf, for the rows start, start + step, ...:
# they run on their rows though they take no part in y, to learn what they would have added. At most `block` rows at a time
# go through an expert.
def excluded_gradient(self, x: Tensor, start: int, step: int, g: Tensor, weights: List[Tensor], eps: float, scale: float, bias: Tensor, outside: Tensor, extra: int, renormalize: bool, block: int, ids: Tensor, combine: Tensor, dcombine: Tensor, sums: Tensor) -> int:
    experts = weights[2].size(0)
    inner = weights[3].size(2)
    gc = g[start::step]
    h = self.rms_norm(x[start::step], weights[0], eps)
    logits = torch.mm(h, weights[1].t())
    s, ranked = torch.sort(logits.masked_fill(torch.isfinite(bias), -inf), stable=True, dim=-1, descending=True)
    best = ranked[:, :extra].contiguous()
    order, counts = self.group_routes(best, experts)
    rows = torch.floor_divide(order, extra)
    sorted = torch.empty([order.size(0)], dtype=x.dtype, device=x.device)
    first = 0
    for e in range(experts):
        for a, b in self.pieces(first, counts[e], block):
            r = rows[a:b]
            gu = self.expert_project_plain(h.index_select(0, r), weights[2], e, weights[4], weights[5], scale)
            act = torch.silu(gu[:, :inner]) * gu[:, inner:]
            o = self.expert_project_plain(act, weights[3], e, weights[6], weights[7], scale)
            sorted[a:b].copy_(o.mul_(gc.index_select(0, r)).sum(1))
        first += counts[e]
    dw = torch.empty_like(sorted).index_copy_(0, order, sorted).reshape([-1, extra])
    # The weight that the expert would have with factor 1, the other weights as they are.
    within = self.inside(logits, outside)
    if renormalize:
        within = logits.gather(1, ids[start::step])
        dw = dw - (combine[start::step] * dcombine[start::step]).sum(1, True)
    w = torch.exp(logits.gather(1, best) - torch.logsumexp(within, 1, True))
    sums.index_add_(0, best.reshape(-1), (w * dw).reshape(-1).to(dtype=7))
    return 0

# theta's gradient [E] += slopes * sums
def mask_logits_gradient(self, sums: Tensor, slopes: Tensor, gradient: Tensor) -> int:
    gradient.add_((sums * slopes).to(dtype=6))
    return 0
