# A Mixture-of-Experts layer over rows x [N, H]: y = x + sum of combine weight * expert(norm(x)) over the top k experts.
# E experts of width I, SwiGLU: down(silu(gate) * up).
# weights = [gamma [H], router [E, H], gate_up [E, 2 I, H] gate rows first, down [E, H, I],
#            A_gate_up [E, r, H], B_gate_up [E, 2 I, r], A_down [E, r, I], B_down [E, H, r]]
# gamma is empty for a layer without norm; the last four are empty for experts without adapters (weight + scale * B A).
# grads has the same order, each empty where the weight is frozen.

# The k chosen experts a row. bias [E] (F64, or empty) raises or, with -inf, forbids experts in the ranking alone;
# the router's own first `protect` choices are never displaced. Ties go to the lower index.
def select_experts(self, logits: Tensor, bias: Tensor, by_probability: bool, protect: int, k: int) -> Tensor:
    if bias.numel() == 0:
        s, order = torch.sort(logits, stable=True, dim=-1, descending=True)
        return order[:, :k].contiguous()
    # In F32 a large bias would swallow the differences between logits.
    exact = logits.to(dtype=7)
    score = torch.softmax(exact, 1) if by_probability else exact
    rank = score + bias
    first = min(protect, k)
    s, own = torch.sort(exact, stable=True, dim=-1, descending=True)
    rank.scatter_(1, own[:, :first], inf)
    s, order = torch.sort(rank, stable=True, dim=-1, descending=True)
    # the protected ones in the router's order, then by rank
    return torch.cat([own[:, :first], order[:, first:k]], 1)

# Combine weights come from the unbiased softmax over all experts, whatever the selection. Divided by their sum they are
# a softmax over the chosen logits; computed so, because all chosen ones may underflow in the full one.
def combine_weights(self, logits: Tensor, ids: Tensor, renormalize: bool) -> Tensor:
    if renormalize:
        return torch.softmax(logits.gather(1, ids), 1)
    return torch.softmax(logits, 1).gather(1, ids)

# Fills ids [N, k] and combine [N, k] for the rows start, start + step, ... The router always computes in F32.
# outside [E] is empty, or -inf for the experts that the softmax of the combine weights leaves out, 0 for the others.
def route(self, x: Tensor, start: int, step: int, weights: List[Tensor], eps: float, bias: Tensor, by_probability: bool, protect: int, outside: Tensor, renormalize: bool, ids: Tensor, combine: Tensor) -> int:
    logits = torch.mm(self.rms_norm(x[start::step], weights[0], eps), weights[1].t())
    chosen = self.select_experts(logits, bias, by_probability, protect, ids.size(1))
    ids[start::step].copy_(chosen)
    combine[start::step].copy_(self.combine_weights(self.inside(logits, outside), chosen, renormalize))
    return 0

# The two halves of route, for experts that are chosen outside: logits [N, E] for the rows start, start + step, ..., and
# the combine weights of ids [N, k].
def router_logits(self, x: Tensor, start: int, step: int, weights: List[Tensor], eps: float, logits: Tensor) -> int:
    logits[start::step].copy_(torch.mm(self.rms_norm(x[start::step], weights[0], eps), weights[1].t()))
    return 0

def combine_chosen(self, logits: Tensor, start: int, step: int, renormalize: bool, ids: Tensor, combine: Tensor) -> int:
    combine[start::step].copy_(self.combine_weights(logits[start::step], ids[start::step], renormalize))
    return 0

def inside(self, logits: Tensor, outside: Tensor) -> Tensor:
    return logits if outside.numel() == 0 else logits + outside

# Rows that go to each expert: positions in the flat route list (row * k + slot), grouped by expert, and group sizes.
def group_routes(self, ids: Tensor, experts: int) -> Tuple[Tensor, List[int]]:
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True, dim=0, descending=False)
    return (order, annotate(List[int], torch.bincount(flat, None, experts).tolist()))

def expert_project(self, x: Tensor, w: Tensor, e: int, a: Tensor, b: Tensor, scale: float) -> Tensor:
    y = self.project(x, w[e])
    if a.numel() > 0:
        y.addmm_(torch.mm(x, a[e].t()), b[e].t(), alpha=scale)
    return y

# Back through expert_project: adds to the gradients and returns that of x.
def expert_project_backward(self, g: Tensor, x: Tensor, w: Tensor, e: int, a: Tensor, b: Tensor, scale: float, dw: Tensor, da: Tensor, db: Tensor) -> Tensor:
    if dw.numel() > 0:
        dw[e].addmm_(g.t(), x)
    dx = self.project_back(g, w[e])
    if a.numel() > 0:
        gb = torch.mm(g, b[e])
        if db.numel() > 0:
            db[e].addmm_(g.t(), torch.mm(x, a[e].t()), alpha=scale)
        if da.numel() > 0:
            da[e].addmm_(gb.t(), x, alpha=scale)
        dx.addmm_(gb, a[e], alpha=scale)
    return dx

# y rows start, start + step, ... = residual * x + experts. One expert at a time, so that the largest buffer is that of
# the busiest expert of the chunk.
def experts_forward(self, x: Tensor, start: int, step: int, weights: List[Tensor], eps: float, scale: float, residual: bool, ids: Tensor, combine: Tensor, y: Tensor) -> int:
    experts = weights[2].size(0)
    inner = weights[3].size(2)
    k = ids.size(1)
    xc = x[start::step]
    h = self.rms_norm(xc, weights[0], eps)
    yc = xc.clone(memory_format=0) if residual else torch.zeros(xc.size(), dtype=xc.dtype, device=xc.device)
    order, counts = self.group_routes(ids[start::step], experts)
    rows = torch.floor_divide(order, k)
    alpha = combine[start::step].reshape(-1).index_select(0, order).unsqueeze(1)
    first = 0
    for e in range(experts):
        last = first + counts[e]
        if last > first:
            r = rows[first:last]
            gu = self.expert_project(h.index_select(0, r), weights[2], e, weights[4], weights[5], scale)
            act = torch.silu(gu[:, :inner]).mul_(gu[:, inner:])
            o = self.expert_project(act, weights[3], e, weights[6], weights[7], scale)
            yc.index_add_(0, r, o.mul_(alpha[first:last]))
        first = last
    y[start::step].copy_(yc)
    return 0

# Gradient of the router's probabilities under the balance loss coef * E * sum over e of f_e P_e, with f_e the routes to
# expert e a token and P_e the mean probability: the same for every token, [E].
def balance_gradient(self, ids: Tensor, experts: int, coefficient: float) -> Tensor:
    n = max(1, ids.size(0))
    routes = torch.bincount(ids.reshape(-1), None, experts).to(dtype=6)
    return routes * (coefficient * experts / (n * n))

# Gradient of the router's logits for that of the combine weights of the chosen experts, and for dbalance [E], the
# gradient of every token's probabilities under a balance loss, or empty.
def logits_backward(self, logits: Tensor, ids: Tensor, dcombine: Tensor, renormalize: bool, dbalance: Tensor) -> Tensor:
    dlogits = self.combine_backward(logits, ids, dcombine, renormalize)
    if dbalance.numel() > 0:
        p = torch.softmax(logits, 1)
        dlogits.add_(p * (dbalance - (p * dbalance).sum(1, True)))
    return dlogits

def combine_backward(self, logits: Tensor, ids: Tensor, dcombine: Tensor, renormalize: bool) -> Tensor:
    if renormalize:
        w = torch.softmax(logits.gather(1, ids), 1)
        ds = w * (dcombine - (w * dcombine).sum(1, True))
        return torch.zeros_like(logits).scatter_(1, ids, ds)
    p = torch.softmax(logits, 1)
    dp = torch.zeros_like(logits).scatter_(1, ids, dcombine)
    return p * (dp - (p * dp).sum(1, True))

# Recomputes gate and up, not down: the gradient of a combine weight is <down' g, activation>. reported [N, k] is filled
# with the gradients of the combine weights, unless it is empty.
def experts_backward(self, x: Tensor, start: int, step: int, g: Tensor, weights: List[Tensor], grads: List[Tensor], eps: float, scale: float, residual: bool, renormalize: bool, dbalance: Tensor, outside: Tensor, ids: Tensor, combine: Tensor, dx: Tensor, reported: Tensor) -> int:
    experts = weights[2].size(0)
    inner = weights[3].size(2)
    k = ids.size(1)
    xc = x[start::step]
    gc = g[start::step].contiguous()
    h = self.rms_norm(xc, weights[0], eps)
    idc = ids[start::step]
    order, counts = self.group_routes(idc, experts)
    rows = torch.floor_divide(order, k)
    alpha = combine[start::step].reshape(-1).index_select(0, order).unsqueeze(1)
    dh = torch.zeros_like(h)
    dalpha = torch.empty([order.size(0)], dtype=x.dtype, device=x.device)
    first = 0
    for e in range(experts):
        last = first + counts[e]
        if last > first:
            r = rows[first:last]
            xs = h.index_select(0, r)
            gu = self.expert_project(xs, weights[2], e, weights[4], weights[5], scale)
            gate = gu[:, :inner]
            up = gu[:, inner:]
            sig = torch.sigmoid(gate)
            sil = gate * sig
            act = sil * up
            w = alpha[first:last]
            # The combine weight scales the activation here, not the gradient, so that dact comes out without it:
            # <dact, act> is the gradient of the combine weight itself.
            dact = self.expert_project_backward(gc.index_select(0, r), act * w, weights[3], e, weights[6], weights[7], scale, grads[3], grads[6], grads[7])
            dalpha[first:last].copy_((act * dact).sum(1))
            dact.mul_(w)
            dgu = torch.empty_like(gu)
            torch.mul(dact, sil, out=dgu[:, inner:])
            # silu'(z) = sig + silu (1 - sig)
            torch.mul(dact.mul_(up), sil.mul_(torch.rsub(sig, 1)).add_(sig), out=dgu[:, :inner])
            dh.index_add_(0, r, self.expert_project_backward(dgu, xs, weights[2], e, weights[4], weights[5], scale, grads[2], grads[4], grads[5]))
        first = last
    dcombine = torch.empty_like(dalpha).index_copy_(0, order, dalpha).reshape([-1, k])
    if reported.numel() > 0:
        reported[start::step].copy_(dcombine)
    logits = self.inside(torch.mm(h, weights[1].t()), outside)
    dlogits = self.logits_backward(logits, idc, dcombine, renormalize, dbalance)
    self.accumulate(grads[1], dlogits, h, 1.0)
    dh.addmm_(dlogits, weights[1])
    dxc = self.rms_norm_backward(xc, weights[0], eps, dh, grads[0])
    if residual:
        dxc = dxc + gc
    dx[start::step].copy_(dxc)
    return 0

# The plain twins of the above, of operations that autograd differentiates, unbounded: router, then experts.
# numbers = [by_probability, protect, renormalize, k]; theta and slopes [E] of a mask that trains, or empty; returns ids
# and combine weights
def router_plain(self, h: Tensor, router: Tensor, bias: Tensor, outside: Tensor, numbers: Tensor, theta: Tensor, slopes: Tensor) -> Tuple[Tensor, Tensor]:
    v = annotate(List[float], numbers.tolist())
    logits = torch.mm(h, router.t())
    ids = self.select_experts(logits.detach(), bias, v[0] > 0, int(v[1]), int(v[3]))
    c = self.combine_weights(self.inside(logits, outside), ids, v[2] > 0)
    if theta.numel() == 0:
        return (ids, c)
    # A factor of value 1 before the weights are divided by their sum (again, where they are already).
    factor = (theta - theta.detach()) * slopes.to(dtype=6) + 1.0
    c = c * factor.index_select(0, ids.reshape(-1)).reshape(ids.size())
    return (ids, c / c.sum(1, True) if v[2] > 0 else c)

# weights = [gate_up, down, A_gate_up, B_gate_up, A_down, B_down]
def experts_plain(self, h: Tensor, ids: Tensor, combine: Tensor, weights: List[Tensor], scale: Tensor) -> Tensor:
    factor = annotate(float, scale.item())
    k = ids.size(1)
    inner = weights[1].size(2)
    flat = ids.reshape(-1)
    alpha = combine.reshape(-1)
    y = torch.zeros_like(h)
    for e in range(weights[0].size(0)):
        route = torch.nonzero(torch.eq(flat, e)).reshape(-1)
        r = torch.floor_divide(route, k)
        gu = self.expert_project_plain(h.index_select(0, r), weights[0][e], weights[2], weights[3], e, factor)
        act = torch.silu(gu[:, :inner]) * gu[:, inner:]
        o = self.expert_project_plain(act, weights[1][e], weights[4], weights[5], e, factor)
        y = y.index_add(0, r, o * alpha.index_select(0, route).unsqueeze(1))
    return y

def expert_project_plain(self, x: Tensor, w: Tensor, a: Tensor, b: Tensor, e: int, scale: float) -> Tensor:
    y = self.project(x, w)
    if a.numel() == 0:
        return y
    return y + torch.mm(torch.mm(x, a[e].t()), b[e].t()) * scale

def merge_adapter(self, w: Tensor, a: Tensor, b: Tensor, scale: float) -> int:
    for e in range(w.size(0)):
        w[e].addmm_(b[e], a[e], alpha=scale)
    return 0
