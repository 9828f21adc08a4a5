# A Mixture-of-Experts layer over rows x [N, H]: y = x + sum of combine weight * expert(norm(x)) over the top k experts.
# E experts of width I, SwiGLU: down(silu(gate) * up).
# weights = [gamma [H], router [E, H], gate_up [E, 2 I, H] gate rows first, down [E, H, I],
#            A_gate_up [E, r, H], B_gate_up [E, 2 I, r], A_down [E, r, I], B_down [E, H, r],
#            shared gate_up [1, 2 S, H], shared down [1, H, S], shared gate [1, H]]
# gamma is empty for a layer without norm; the adapters are empty for experts without any (weight + scale * B A), the last
# three for a layer without shared experts, and the last for ungated ones.
# grads has the same order, each empty where the weight is frozen.
# Rows go through an expert at most `block` at a time, so that scratch, which the caller makes once for all chunks, is as
# large whatever the router does. wide (F32) and half (the experts' type, or empty) are cut by block_rows.

# The k chosen experts a row. bias [E] (F64, or empty) raises or, with -inf, forbids experts in the ranking alone;
# the router's own first `protect` choices are never displaced. Ties go to the lower index.
# balance [E] (F64, or empty) is added to the probabilities, which are those of the raised logits.
def select_experts(self, logits: Tensor, bias: Tensor, by_probability: bool, protect: int, balance: Tensor, k: int) -> Tensor:
    if bias.numel() == 0 and balance.numel() == 0:
        s, order = torch.sort(logits, stable=True, dim=-1, descending=True)
        return order[:, :k].contiguous()
    # In F32 a large bias would swallow the differences between logits.
    exact = logits.to(dtype=7)
    raised = exact
    if bias.numel() > 0 and not by_probability:
        raised = exact + bias
    rank = raised.clone()
    if by_probability or balance.numel() > 0:
        rank = torch.softmax(raised, 1)
        if by_probability and bias.numel() > 0:
            rank = rank + bias
        if balance.numel() > 0:
            # a forbidden expert has the probability zero, which a positive number would lift
            rank = (rank + balance).masked_fill_(torch.eq(raised, -inf), -inf)
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

# n rows of a width in scratch, behind arrays that are `before` numbers wide together.
def block_rows(self, scratch: Tensor, block: int, before: int, n: int, width: int) -> Tensor:
    return scratch[block * before:block * before + n * width].view([n, width])

# The rows first to last of the chunk start, start + step, ...
def chunk_rows(self, x: Tensor, start: int, step: int, first: int, last: int) -> Tensor:
    return x[start + first * step:start + last * step:step]

# How many rows those are in all.
def chunk_size(self, x: Tensor, start: int, step: int) -> int:
    return max(0, (x.size(0) - start + step - 1) // step)

# Normed rows, in scratch; the rows themselves where there is no norm.
def norm_block(self, x: Tensor, gamma: Tensor, eps: float, h: Tensor) -> Tensor:
    if gamma.numel() == 0:
        return x
    return torch.mul(x, self.row_scale(x, eps), out=h).mul_(gamma)

# 1 / sqrt(mean(x^2) + eps) of every row, [n, 1].
def row_scale(self, x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg_vector_norm(x, 2, [1], True)
    return norm.mul_(norm).div_(x.size(1)).add_(eps).rsqrt_()

# Adds [sum of probabilities [E], routes [E], sum of squared log-sum-exps, rows] to sums [2 E + 2] (F64). Rows whose mask
# is 0 do not count; an empty mask counts all.
def add_router_sums(self, logits: Tensor, ids: Tensor, mask: Tensor, sums: Tensor) -> int:
    experts = logits.size(1)
    if mask.numel() > 0:
        counted = torch.nonzero(mask).reshape(-1)
        logits = logits.index_select(0, counted)
        ids = ids.index_select(0, counted)
    lse = torch.logsumexp(logits, [1])
    sums[:experts].add_(torch.sum(torch.softmax(logits, 1), [0], False, dtype=7))
    sums[experts:2 * experts].add_(torch.bincount(ids.reshape(-1), None, experts))
    sums[2 * experts:2 * experts + 1].add_(torch.sum(lse * lse, dtype=7))
    sums[2 * experts + 1:].add_(logits.size(0))
    return 0

# The chunk's part of a mask that may be empty.
def mask_rows(self, mask: Tensor, start: int, step: int, first: int, last: int) -> Tensor:
    return self.chunk_rows(mask, start, step, first, last) if mask.numel() > 0 else mask

# Fills ids [N, k] and combine [N, k] for the rows start, start + step, ... The router always computes in F32.
# outside [E] is empty, or -inf for the experts that the softmax of the combine weights leaves out, 0 for the others.
# sums (or empty) is added to.
def route(self, x: Tensor, start: int, step: int, weights: List[Tensor], eps: float, bias: Tensor, by_probability: bool, protect: int, balance: Tensor, outside: Tensor, renormalize: bool, mask: Tensor, sums: Tensor, ids: Tensor, combine: Tensor, block: int, wide: Tensor) -> int:
    rows = self.chunk_size(x, start, step)
    for first in range(0, rows, block):
        last = min(rows, first + block)
        xb = self.chunk_rows(x, start, step, first, last)
        h = self.norm_block(xb, weights[0], eps, self.block_rows(wide, block, 0, last - first, x.size(1)))
        logits = torch.mm(h, weights[1].t())
        chosen = self.select_experts(logits, bias, by_probability, protect, balance, ids.size(1))
        self.chunk_rows(ids, start, step, first, last).copy_(chosen)
        self.chunk_rows(combine, start, step, first, last).copy_(self.combine_weights(self.inside(logits, outside), chosen, renormalize))
        if sums.numel() > 0:
            self.add_router_sums(logits, chosen, self.mask_rows(mask, start, step, first, last), sums)
    return 0

# The two halves of route over all rows, for experts that are chosen outside: logits [N, E], and the combine weights of ids.
def router_logits(self, x: Tensor, weights: List[Tensor], eps: float, block: int, wide: Tensor, logits: Tensor) -> int:
    for first in range(0, x.size(0), block):
        xb = x[first:first + block]
        h = self.norm_block(xb, weights[0], eps, self.block_rows(wide, block, 0, xb.size(0), x.size(1)))
        logits[first:first + block].copy_(torch.mm(h, weights[1].t()))
    return 0

def combine_chosen(self, logits: Tensor, renormalize: bool, mask: Tensor, sums: Tensor, ids: Tensor, combine: Tensor) -> int:
    combine.copy_(self.combine_weights(logits, ids, renormalize))
    if sums.numel() > 0:
        self.add_router_sums(logits, ids, mask, sums)
    return 0

# With f_e the routes to expert e a row, P_e its mean probability: balance = E * sum over e of f_e P_e, z = mean squared
# log-sum-exp. Both are zero where no row counts.
def router_losses(self, sums: Tensor, balance: Tensor, z: Tensor) -> int:
    e = (sums.size(0) - 2) // 2
    n = torch.clamp_min(sums[2 * e + 1], 1.0)
    balance.copy_((sums[:e] * sums[e:2 * e]).sum() * e / (n * n))
    z.copy_(sums[2 * e] / n)
    return 0

# [E + 1]: what the two losses times their factors have as gradients in the probabilities of every counted row, and in its
# squared log-sum-exp.
def router_loss_gradients(self, sums: Tensor, balance: float, z: float) -> Tensor:
    e = (sums.size(0) - 2) // 2
    n = torch.clamp_min(sums[2 * e + 1:], 1.0)
    return torch.cat([sums[e:2 * e] * (balance * e) / (n * n), torch.reciprocal(n) * z], 0).to(dtype=6)

# The logits that the softmax of the combine weights sees.
def inside(self, logits: Tensor, outside: Tensor) -> Tensor:
    return logits if outside.numel() == 0 else logits + outside

# Rows that go to each expert: positions in the flat route list (row * k + slot), grouped by expert, and group sizes.
def group_routes(self, ids: Tensor, experts: int) -> Tuple[Tensor, List[int]]:
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True, dim=0, descending=False)
    return (order, annotate(List[int], torch.bincount(flat, None, experts).tolist()))

# y = x w'; through half where w is of another type
def product_into(self, x: Tensor, w: Tensor, block: int, half: Tensor, y: Tensor) -> int:
    if x.dtype == w.dtype:
        torch.mm(x, w, out=y)
        return 0
    xh = self.block_rows(half, block, 0, x.size(0), x.size(1))
    yh = self.block_rows(half, block, x.size(1), y.size(0), y.size(1))
    torch.mm(xh.copy_(x), w, out=yh)
    y.copy_(yh)
    return 0

# y = x (w + scale b a)'; low [n, r] is scratch
def expert_project(self, x: Tensor, w: Tensor, e: int, a: Tensor, b: Tensor, scale: float, block: int, half: Tensor, low: Tensor, y: Tensor) -> int:
    self.product_into(x, w[e].t(), block, half, y)
    if a.numel() > 0:
        y.addmm_(torch.mm(x, a[e].t(), out=low), b[e].t(), alpha=scale)
    return 0

# dx = g (w + scale b a)
def expert_project_back(self, g: Tensor, w: Tensor, e: int, a: Tensor, b: Tensor, scale: float, block: int, half: Tensor, low: Tensor, dx: Tensor) -> int:
    self.product_into(g, w[e], block, half, dx)
    if a.numel() > 0:
        dx.addmm_(torch.mm(g, b[e], out=low), a[e], alpha=scale)
    return 0

# Adds to the gradients of w, a and b.
def expert_gradients(self, g: Tensor, x: Tensor, e: int, a: Tensor, b: Tensor, scale: float, low: Tensor, dw: Tensor, da: Tensor, db: Tensor) -> int:
    if dw.numel() > 0:
        dw[e].addmm_(g.t(), x)
    if db.numel() > 0:
        db[e].addmm_(g.t(), torch.mm(x, a[e].t(), out=low), alpha=scale)
    if da.numel() > 0:
        da[e].addmm_(torch.mm(g, b[e], out=low).t(), x, alpha=scale)
    return 0

# Replaces rows [n, H] of one expert by alpha * expert(rows). Scratch: 2 I for gate and up, r for adapters.
def block_forward(self, rows: Tensor, alpha: Tensor, e: int, weights: List[Tensor], scale: float, block: int, wide: Tensor, half: Tensor) -> int:
    n = rows.size(0)
    inner = weights[3].size(2)
    gu = self.block_rows(wide, block, 0, n, inner * 2)
    low = self.block_rows(wide, block, inner * 2, n, self.rank(weights))
    self.expert_project(rows, weights[2], e, weights[4], weights[5], scale, block, half, low, gu)
    act = torch.silu_(gu[:, :inner]).mul_(gu[:, inner:])
    self.expert_project(act, weights[3], e, weights[6], weights[7], scale, block, half, low, rows)
    rows.mul_(alpha)
    return 0

# Replaces the gradients g [n, H] of block_forward's outputs by those of its rows, adds to the weights' gradients and
# fills dalpha [n]. Overwrites rows. Recomputes gate and up, not down: the gradient of a combine weight is
# <down' g, activation>. Scratch: 2 I for gate and up, 3 I, r for adapters.
def block_backward(self, rows: Tensor, g: Tensor, alpha: Tensor, dalpha: Tensor, e: int, weights: List[Tensor], grads: List[Tensor], scale: float, block: int, wide: Tensor, half: Tensor) -> int:
    n = rows.size(0)
    inner = weights[3].size(2)
    gu = self.block_rows(wide, block, 0, n, inner * 2)
    gate = gu[:, :inner]
    up = gu[:, inner:]
    dact = self.block_rows(wide, block, inner * 2, n, inner)
    sil = self.block_rows(wide, block, inner * 3, n, inner)
    act = self.block_rows(wide, block, inner * 4, n, inner)
    low = self.block_rows(wide, block, inner * 5, n, self.rank(weights))
    self.expert_project(rows, weights[2], e, weights[4], weights[5], scale, block, half, low, gu)
    self.expert_project_back(g, weights[3], e, weights[6], weights[7], scale, block, half, low, dact)
    torch.silu(gate, out=sil)
    torch.mul(sil, up, out=act)
    # Combine weights scale rows and gradients of width H, and leave dact without them: <dact, act> is the gradient of
    # the combine weight itself.
    g.mul_(alpha)
    self.expert_gradients(g, act, e, weights[6], weights[7], scale, low, grads[3], grads[6], grads[7])
    torch.mul(dact, up, out=act)
    torch.mul(dact, sil, out=up)
    torch.sum(sil.mul_(act), [1], out=dalpha)
    torch.silu_backward(act, gate, grad_input=gate)
    rows.mul_(alpha)
    self.expert_gradients(gu, rows, e, weights[4], weights[5], scale, low, grads[2], grads[4], grads[5])
    self.expert_project_back(gu, weights[2], e, weights[4], weights[5], scale, block, half, low, g)
    g.mul_(alpha)
    return 0

# Rank of the adapters, 0 without.
def rank(self, weights: List[Tensor]) -> int:
    return weights[4].size(1) if weights[4].numel() > 0 else 0

# Replaces rows [R, H], grouped by expert, counts[e] of each, by alpha [R, 1] * expert(rows).
def grouped_forward(self, rows: Tensor, counts: List[int], alpha: Tensor, weights: List[Tensor], scale: float, block: int, wide: Tensor, half: Tensor) -> int:
    first = 0
    for e in range(weights[2].size(0)):
        for a, b in self.pieces(first, counts[e], block):
            self.block_forward(rows[a:b], alpha[a:b], e, weights, scale, block, wide, half)
        first += counts[e]
    return 0

# Back through grouped_forward; rows are its inputs. Both are overwritten, g by the gradients of the rows.
def grouped_backward(self, rows: Tensor, g: Tensor, counts: List[int], alpha: Tensor, dalpha: Tensor, weights: List[Tensor], grads: List[Tensor], scale: float, block: int, wide: Tensor, half: Tensor) -> int:
    first = 0
    for e in range(weights[2].size(0)):
        for a, b in self.pieces(first, counts[e], block):
            self.block_backward(rows[a:b], g[a:b], alpha[a:b], dalpha[a:b], e, weights, grads, scale, block, wide, half)
        first += counts[e]
    return 0

# Bounds of the rows first ... first + count in as few equal pieces of at most block rows as there can be.
def pieces(self, first: int, count: int, block: int) -> List[Tuple[int, int]]:
    bounds = annotate(List[Tuple[int, int]], [])
    n = (count + block - 1) // block
    for i in range(n):
        bounds.append((first + count * i // n, first + count * (i + 1) // n))
    return bounds

# Token and combine weight of each route of a chunk, grouped by expert.
def chunk_routes(self, start: int, step: int, ids: Tensor, combine: Tensor, experts: int) -> Tuple[Tensor, Tensor, Tensor, List[int]]:
    order, counts = self.group_routes(ids[start::step], experts)
    token = torch.floor_divide(order, ids.size(1)).mul_(step).add_(start)
    alpha = combine[start::step].reshape(-1).index_select(0, order).unsqueeze(1)
    return (order, token, alpha, counts)

# y rows start, start + step, ... = residual * x + experts. Scratch: as block_forward, and behind it H for rows.
def experts_forward(self, x: Tensor, start: int, step: int, weights: List[Tensor], eps: float, scale: float, residual: bool, ids: Tensor, combine: Tensor, block: int, wide: Tensor, half: Tensor, y: Tensor) -> int:
    yc = y[start::step]
    if residual:
        yc.copy_(x[start::step])
    else:
        yc.zero_()
    order, token, alpha, counts = self.chunk_routes(start, step, ids, combine, weights[2].size(0))
    before = weights[3].size(2) * 2 + self.rank(weights)
    first = 0
    for e in range(weights[2].size(0)):
        for a, b in self.pieces(first, counts[e], block):
            t = token[a:b]
            rows = self.block_rows(wide, block, before, b - a, x.size(1))
            torch.index_select(x, 0, t, out=rows)
            self.norm_block(rows, weights[0], eps, rows)
            self.block_forward(rows, alpha[a:b], e, weights, scale, block, wide, half)
            y.index_add_(0, t, rows)
        first += counts[e]
    self.shared_forward(x, start, step, weights, eps, block, wide, half, y)
    return 0

# The shared experts in the order of the others: one expert, without adapters, that every row goes to.
def shared_weights(self, weights: List[Tensor]) -> List[Tensor]:
    none = torch.empty([0], dtype=6, device=weights[8].device)
    return [none, none, weights[8], weights[9], none, none, none, none]

# What the output of the shared experts is multiplied by, [n, 1].
def shared_gate(self, h: Tensor, gate: Tensor) -> Tensor:
    if gate.numel() == 0:
        return torch.ones([h.size(0), 1], dtype=h.dtype, device=h.device)
    return torch.sigmoid(torch.mm(h, gate.t()))

# Adds the shared experts' part to the chunk's rows of y. Scratch: as block_forward, and behind it H for rows.
def shared_forward(self, x: Tensor, start: int, step: int, weights: List[Tensor], eps: float, block: int, wide: Tensor, half: Tensor, y: Tensor) -> int:
    if weights[9].numel() == 0:
        return 0
    own = self.shared_weights(weights)
    before = own[3].size(2) * 2
    for first, last in self.pieces(0, self.chunk_size(x, start, step), block):
        rows = self.block_rows(wide, block, before, last - first, x.size(1))
        rows.copy_(self.chunk_rows(x, start, step, first, last))
        self.norm_block(rows, weights[0], eps, rows)
        self.block_forward(rows, self.shared_gate(rows, weights[10]), 0, own, 0.0, block, wide, half)
        self.chunk_rows(y, start, step, first, last).add_(rows)
    return 0

# Back through shared_forward: adds the gradients of the normed rows to the chunk's rows of dh. Scratch: as
# block_backward, and behind it H for rows and H for gradients.
def shared_backward(self, x: Tensor, start: int, step: int, g: Tensor, weights: List[Tensor], grads: List[Tensor], eps: float, block: int, wide: Tensor, half: Tensor, dh: Tensor) -> int:
    if weights[9].numel() == 0:
        return 0
    own = self.shared_weights(weights)
    into = self.shared_weights(grads)
    hidden = x.size(1)
    before = own[3].size(2) * 5
    for first, last in self.pieces(0, self.chunk_size(x, start, step), block):
        xb = self.chunk_rows(x, start, step, first, last)
        rows = self.block_rows(wide, block, before, last - first, hidden)
        rows.copy_(xb)
        self.norm_block(rows, weights[0], eps, rows)
        gs = self.block_rows(wide, block, before + hidden, last - first, hidden)
        gs.copy_(self.chunk_rows(g, start, step, first, last))
        alpha = self.shared_gate(rows, weights[10])
        dalpha = torch.empty([last - first], dtype=x.dtype, device=x.device)
        self.block_backward(rows, gs, alpha, dalpha, 0, own, into, 0.0, block, wide, half)
        if weights[10].numel() > 0:
            dlogit = torch.sigmoid_backward(dalpha.unsqueeze(1), alpha)
            rows.copy_(xb)
            self.accumulate(grads[10], dlogit, self.norm_block(rows, weights[0], eps, rows), 1.0)
            gs.addmm_(dlogit, weights[10])
        self.chunk_rows(dh, start, step, first, last).add_(gs)
    return 0

# Gradient of the router's logits for that of the combine weights of the chosen experts, and for what
# router_loss_gradients returned, or empty; the latter where the mask (or empty) is not 0.
def logits_backward(self, logits: Tensor, ids: Tensor, dcombine: Tensor, renormalize: bool, dlosses: Tensor, mask: Tensor, outside: Tensor) -> Tensor:
    dlogits = self.combine_backward(self.inside(logits, outside), ids, dcombine, renormalize)
    if dlosses.numel() > 0:
        e = logits.size(1)
        p = torch.softmax(logits, 1)
        dp = dlosses[:e]
        dlse = torch.logsumexp(logits, [1], True) * (dlosses[e:] * 2)
        d = p * (dp - (p * dp).sum(1, True) + dlse)
        if mask.numel() > 0:
            d.masked_fill_(torch.eq(mask, 0).unsqueeze(1), 0.0)
        dlogits.add_(d)
    return dlogits

# Gradient of the logits for that of combine_weights.
def combine_backward(self, logits: Tensor, ids: Tensor, dcombine: Tensor, renormalize: bool) -> Tensor:
    if renormalize:
        w = torch.softmax(logits.gather(1, ids), 1)
        ds = w * (dcombine - (w * dcombine).sum(1, True))
        return torch.zeros_like(logits).scatter_(1, ids, ds)
    p = torch.softmax(logits, 1)
    dp = torch.zeros_like(logits).scatter_(1, ids, dcombine)
    return p * (dp - (p * dp).sum(1, True))

# Backward of a chunk, the experts first; fills dx rows start, start + step, ...
# reported [N, k] is filled with the gradients of the combine weights, unless it is empty.
# Scratch: as block_backward, and behind it H for rows and H for gradients.
def experts_backward(self, x: Tensor, start: int, step: int, g: Tensor, weights: List[Tensor], grads: List[Tensor], eps: float, scale: float, residual: bool, renormalize: bool, dlosses: Tensor, mask: Tensor, outside: Tensor, ids: Tensor, combine: Tensor, block: int, wide: Tensor, half: Tensor, dx: Tensor, reported: Tensor) -> int:
    hidden = x.size(1)
    # until the norm, dx holds the gradient of the normed rows
    dx[start::step].zero_()
    order, token, alpha, counts = self.chunk_routes(start, step, ids, combine, weights[2].size(0))
    before = weights[3].size(2) * 5 + self.rank(weights)
    dalpha = torch.empty([order.size(0)], dtype=x.dtype, device=x.device)
    first = 0
    for e in range(weights[2].size(0)):
        for a, b in self.pieces(first, counts[e], block):
            t = token[a:b]
            rows = self.block_rows(wide, block, before, b - a, hidden)
            torch.index_select(x, 0, t, out=rows)
            self.norm_block(rows, weights[0], eps, rows)
            gs = self.block_rows(wide, block, before + hidden, b - a, hidden)
            torch.index_select(g, 0, t, out=gs)
            self.block_backward(rows, gs, alpha[a:b], dalpha[a:b], e, weights, grads, scale, block, wide, half)
            dx.index_add_(0, t, gs)
        first += counts[e]
    self.shared_backward(x, start, step, g, weights, grads, eps, block, wide, half, dx)
    dcombine = torch.empty_like(dalpha).index_copy_(0, order, dalpha).reshape([-1, ids.size(1)])
    if reported.numel() > 0:
        reported[start::step].copy_(dcombine)
    self.router_backward(x, start, step, g, weights, grads, eps, residual, renormalize, dlosses, mask, outside, ids, dcombine, block, wide, dx)
    return 0

# The rest of a chunk's backward: router, norm, residual. dx holds the gradient of the normed rows that the experts left,
# and is replaced by that of the rows. dcombine [n, k] is the chunk's.
def router_backward(self, x: Tensor, start: int, step: int, g: Tensor, weights: List[Tensor], grads: List[Tensor], eps: float, residual: bool, renormalize: bool, dlosses: Tensor, mask: Tensor, outside: Tensor, ids: Tensor, dcombine: Tensor, block: int, wide: Tensor, dx: Tensor) -> int:
    hidden = x.size(1)
    total = dcombine.size(0)
    for first in range(0, total, block):
        last = min(total, first + block)
        xb = self.chunk_rows(x, start, step, first, last)
        d = self.chunk_rows(dx, start, step, first, last)
        h = self.norm_block(xb, weights[0], eps, self.block_rows(wide, block, 0, last - first, hidden))
        logits = torch.mm(h, weights[1].t())
        dlogits = self.logits_backward(logits, self.chunk_rows(ids, start, step, first, last), dcombine[first:last], renormalize, dlosses, self.mask_rows(mask, start, step, first, last), outside)
        self.accumulate(grads[1], dlogits, h, 1.0)
        d.addmm_(dlogits, weights[1])
        self.norm_block_backward(xb, weights[0], eps, d, grads[0], block, wide)
        if residual:
            d.add_(self.chunk_rows(g, start, step, first, last))
    return 0

# Turns d, the gradient of normed rows, into that of the rows; adds to dgamma unless that is empty.
def norm_block_backward(self, x: Tensor, gamma: Tensor, eps: float, d: Tensor, dgamma: Tensor, block: int, wide: Tensor) -> int:
    if gamma.numel() == 0:
        return 0
    xhat = self.block_rows(wide, block, 0, x.size(0), x.size(1))
    product = self.block_rows(wide, block, x.size(1), x.size(0), x.size(1))
    rstd = self.row_scale(x, eps)
    torch.mul(x, rstd, out=xhat)
    if dgamma.numel() > 0:
        dgamma.add_(torch.mul(d, xhat, out=product).sum(0))
    d.mul_(gamma)
    mean = torch.mul(d, xhat, out=product).mean(-1, True)
    d.sub_(xhat.mul_(mean)).mul_(rstd)
    return 0

# Scratch of `wide` and `half` numbers; the latter is of the experts' type, and empty if that is F32.
def experts_scratch(self, weights: List[Tensor], wide: int, half: int) -> Tuple[Tensor, Tensor]:
    w = weights[3]
    n = 0 if w.dtype == 6 else half
    return (torch.empty([wide], dtype=6, device=w.device), torch.empty([n], dtype=w.dtype, device=w.device))

# The plain twins of the above, of operations that autograd differentiates, unbounded: router, then experts.
# numbers = [by_probability, protect, renormalize, k]; theta and slopes [E] of a mask that trains, or empty; returns ids
# and combine weights
def router_plain(self, h: Tensor, router: Tensor, bias: Tensor, balance: Tensor, outside: Tensor, numbers: Tensor, theta: Tensor, slopes: Tensor) -> Tuple[Tensor, Tensor]:
    v = annotate(List[float], numbers.tolist())
    logits = torch.mm(h, router.t())
    ids = self.select_experts(logits.detach(), bias, v[0] > 0, int(v[1]), balance, int(v[3]))
    c = self.combine_weights(self.inside(logits, outside), ids, v[2] > 0)
    if theta.numel() == 0:
        return (ids, c)
    # A factor of value 1 before the weights are divided by their sum (again, where they are already).
    factor = (theta - theta.detach()) * slopes.to(dtype=6) + 1.0
    c = c * factor.index_select(0, ids.reshape(-1)).reshape(ids.size())
    return (ids, c / c.sum(1, True) if v[2] > 0 else c)

# Balance and z loss.
def router_losses_plain(self, h: Tensor, router: Tensor, ids: Tensor, mask: Tensor) -> Tuple[Tensor, Tensor]:
    if mask.numel() > 0:
        counted = torch.nonzero(mask).reshape(-1)
        h = h.index_select(0, counted)
        ids = ids.index_select(0, counted)
    experts = router.size(0)
    n = max(1, h.size(0))
    logits = torch.mm(h, router.t())
    f = torch.bincount(ids.reshape(-1), None, experts).to(dtype=6) / n
    mean = torch.softmax(logits, 1).sum(0) / n
    lse = torch.logsumexp(logits, [1])
    return ((f * mean).sum() * experts, (lse * lse).sum() / n)

def router_sums(self, h: Tensor, router: Tensor, ids: Tensor, mask: Tensor, sums: Tensor) -> int:
    return self.add_router_sums(torch.mm(h, router.t()), ids, mask, sums)

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
        gu = self.expert_project_plain(h.index_select(0, r), weights[0], e, weights[2], weights[3], factor)
        act = torch.silu(gu[:, :inner]) * gu[:, inner:]
        o = self.expert_project_plain(act, weights[1], e, weights[4], weights[5], factor)
        y = y.index_add(0, r, o * alpha.index_select(0, route).unsqueeze(1))
    return y

def expert_project_plain(self, x: Tensor, w: Tensor, e: int, a: Tensor, b: Tensor, scale: float) -> Tensor:
    y = self.project(x, w[e])
    if a.numel() == 0:
        return y
    return y + torch.mm(torch.mm(x, a[e].t()), b[e].t()) * scale

# Per expert w = (w + scale b a), summed in F32 and cast once. Returns how many elements of w changed, or -1 if the result
# is not finite.
def merge_adapter(self, w: Tensor, a: Tensor, b: Tensor, scale: float) -> float:
    changed = 0
    finite = True
    for e in range(w.size(0)):
        merged = torch.addmm(w[e].to(dtype=6), b[e], a[e], alpha=scale).to(dtype=w.dtype)
        changed += int(torch.sum(torch.ne(merged, w[e])).item())
        finite = finite and bool(torch.isfinite(merged).all().item())
        w[e].copy_(merged)
    return float(changed) if finite else -1.0
