# Experts of rows that lie anywhere: routes are grouped by expert, and an expert's routes run in blocks of rows, so that
# the scratch is fixed. A rank has experts of its own and, lent for a layer, some of other ranks'.
#   weights = [gate_up [own, 2 I, H], down [own, H, I], lent gate_up [lent, 2 I, H], lent down [lent, H, I]]
#   grads: the same, each empty where nothing is trained
#   scratch = [block, H], [block, 2 I], and for backward [block, H], 4 x [block, I]
# A slot numbers the experts of a rank: its own, then the lent ones.
# A row that travels is H values, then k combine weights, then the k experts they belong to (-1: not for this rank).

def view_rows(self, memory: Tensor, rows: int, width: int) -> Tensor:
    return memory[:rows * width].view(rows, width)

def rows_of(self, array: Tensor, first: int, rows: int) -> Tensor:
    return array[first:first + rows]

def slab(self, stack: Tensor, index: int) -> Tensor:
    return stack[index]

def add_slab(self, stack: Tensor, index: int, part: Tensor) -> int:
    stack[index].add_(part)
    return 0

# As many arrays of the type and shape of the stack's elements.
def new_stack(self, stack: Tensor, count: int) -> Tensor:
    return torch.empty([count, stack.size(1), stack.size(2)], dtype=stack.dtype, device=stack.device)

def fill_zero(self, array: Tensor) -> int:
    array.zero_()
    return 0

def gather_rows(self, x: Tensor, tokens: Tensor, to: Tensor, at: int) -> int:
    torch.index_select(x, 0, tokens, out=to[at:at + tokens.size(0)])
    return 0

# tokens: those for targets[0], counts[0] many, then those for targets[1], ...; destinations [N, k]: the rank of a route.
def pack_rows(self, x: Tensor, ids: Tensor, combine: Tensor, destinations: Tensor, tokens: Tensor, targets: List[int], counts: List[int], to: Tensor, at: int) -> int:
    hidden = x.size(1)
    k = ids.size(1)
    first = 0
    for i in range(len(targets)):
        last = first + counts[i]
        if last > first:
            t = tokens[first:last]
            into = to[at + first:at + last]
            mine = torch.eq(destinations.index_select(0, t), targets[i])
            into[:, :hidden].copy_(x.index_select(0, t))
            into[:, hidden:hidden + k].copy_(combine.index_select(0, t).mul_(mine))
            into[:, hidden + k:].copy_(ids.index_select(0, t).masked_fill_(torch.logical_not(mine), -1))
        first = last
    return 0

# y rows += what has come back for them; a token may have several rows.
def add_rows(self, rows: Tensor, tokens: Tensor, y: Tensor) -> int:
    y.index_add_(0, tokens, rows)
    return 0

# (positions in the flat slot list, grouped by slot; routes a slot); slots outside 0 .. count - 1 are left out.
def group_slots(self, slots: Tensor, count: int) -> Tuple[Tensor, List[int]]:
    order = torch.argsort(slots, stable=True, dim=0, descending=False)
    counts = annotate(List[int], torch.bincount(slots, None, count + 1).tolist())
    routes = 0
    for s in range(count):
        routes += counts[s]
    return (order[:routes], counts[:count])

def group_received(self, rows: Tensor, k: int, table: Tensor, count: int) -> Tuple[Tensor, List[int]]:
    experts = rows[:, rows.size(1) - k:].reshape(-1).to(dtype=4)
    return self.group_slots(torch.where(torch.lt(experts, 0), torch.full_like(experts, count), table.index_select(0, experts.clamp(min=0))), count)

def expert_slab(self, own: Tensor, lent: Tensor, slot: int, owned: int) -> Tensor:
    stack = own if slot < owned else lent
    if stack.numel() == 0:
        return stack
    return stack[slot if slot < owned else slot - owned]

def project_into(self, x: Tensor, w: Tensor, out: Tensor) -> int:
    if x.dtype == w.dtype:
        torch.mm(x, w.t(), out=out)
    else:
        out.copy_(torch.mm(x.to(w.dtype), w.t()))
    return 0

def project_back_into(self, g: Tensor, w: Tensor, out: Tensor) -> int:
    if g.dtype == w.dtype:
        torch.mm(g, w, out=out)
    else:
        out.copy_(torch.mm(g.to(w.dtype), w))
    return 0

# y[rows] += alpha * expert(x[rows])
def grouped_forward(self, x: Tensor, rows: Tensor, alpha: Tensor, counts: List[int], weights: List[Tensor], scratch: List[Tensor], y: Tensor) -> int:
    owned = weights[0].size(0)
    inner = weights[1].size(2)
    block = scratch[0].size(0)
    first = 0
    for slot in range(len(counts)):
        end = first + counts[slot]
        while first < end:
            last = min(first + block, end)
            r = rows[first:last]
            xs = scratch[0][:last - first]
            gu = scratch[1][:last - first]
            torch.index_select(x, 0, r, out=xs)
            self.project_into(xs, self.expert_slab(weights[0], weights[2], slot, owned), gu)
            act = gu[:, :inner]
            torch.silu_(act)
            act.mul_(gu[:, inner:]).mul_(alpha[first:last].unsqueeze(1))
            # the rows themselves are no longer needed
            self.project_into(act, self.expert_slab(weights[1], weights[3], slot, owned), xs)
            y.index_add_(0, r, xs)
            first = last
    return 0

# dx[rows] += ..., dalpha = <down' g, activation>: gate and up are computed again, down is not.
def grouped_backward(self, x: Tensor, g: Tensor, rows: Tensor, alpha: Tensor, counts: List[int], weights: List[Tensor], grads: List[Tensor], scratch: List[Tensor], dx: Tensor, dalpha: Tensor) -> int:
    owned = weights[0].size(0)
    inner = weights[1].size(2)
    block = scratch[0].size(0)
    first = 0
    for slot in range(len(counts)):
        end = first + counts[slot]
        while first < end:
            last = min(first + block, end)
            n = last - first
            r = rows[first:last]
            gate_up = self.expert_slab(weights[0], weights[2], slot, owned)
            w = alpha[first:last].unsqueeze(1)
            xs = scratch[0][:n]
            gu = scratch[1][:n]
            gs = scratch[2][:n]
            dact = scratch[3][:n]
            sig = scratch[4][:n]
            act = scratch[5][:n]
            part = scratch[6][:n]
            torch.index_select(x, 0, r, out=xs)
            torch.index_select(g, 0, r, out=gs)
            self.project_into(xs, gate_up, gu)
            self.project_back_into(gs, self.expert_slab(weights[1], weights[3], slot, owned), dact)
            gate = gu[:, :inner]
            up = gu[:, inner:]
            torch.sigmoid(gate, out=sig)
            gate.mul_(sig)
            torch.mul(gate, up, out=act)
            torch.mul(act, dact, out=part)
            dalpha[first:last].copy_(part.sum([1]))
            self.accumulate(self.expert_slab(grads[1], grads[3], slot, owned), gs, act.mul_(w), 1.0)
            dact.mul_(w)
            # silu'(z) = sig + silu (1 - sig)
            torch.mul(gate, sig, out=part)
            sig.add_(gate).sub_(part).mul_(up).mul_(dact)
            torch.mul(dact, gate, out=up)
            gate.copy_(sig)
            self.accumulate(self.expert_slab(grads[0], grads[2], slot, owned), gu, xs, 1.0)
            self.project_back_into(gu, gate_up, gs)
            dx.index_add_(0, r, gs)
            first = last
    return 0

# Rows of this process: x [N, H], the chunk's tokens [n], ids [N, k] and combine [N, k] where they lie.
def local_forward(self, x: Tensor, tokens: Tensor, ids: Tensor, combine: Tensor, weights: List[Tensor], scratch: List[Tensor], y: Tensor) -> int:
    k = ids.size(1)
    order, counts = self.group_slots(ids.index_select(0, tokens).reshape(-1), weights[0].size(0))
    rows = tokens.index_select(0, torch.floor_divide(order, k))
    alpha = combine.reshape(-1).index_select(0, rows * k + torch.remainder(order, k))
    return self.grouped_forward(x, rows, alpha, counts, weights, scratch, y)

def local_backward(self, x: Tensor, tokens: Tensor, g: Tensor, ids: Tensor, combine: Tensor, weights: List[Tensor], grads: List[Tensor], scratch: List[Tensor], dx: Tensor, dcombine: Tensor) -> int:
    k = ids.size(1)
    order, counts = self.group_slots(ids.index_select(0, tokens).reshape(-1), weights[0].size(0))
    rows = tokens.index_select(0, torch.floor_divide(order, k))
    route = rows * k + torch.remainder(order, k)
    alpha = combine.reshape(-1).index_select(0, route)
    dalpha = torch.empty_like(alpha)
    self.grouped_backward(x, g, rows, alpha, counts, weights, grads, scratch, dx, dalpha)
    dcombine.view(-1).index_copy_(0, route, dalpha)
    return 0

# Rows that have travelled [R, H + 2 k]; table [E]: the slot of an expert. out [R, H] is overwritten.
def received_forward(self, rows: Tensor, k: int, table: Tensor, slots: int, weights: List[Tensor], scratch: List[Tensor], out: Tensor) -> int:
    hidden = out.size(1)
    order, counts = self.group_received(rows, k, table, slots)
    alpha = rows[:, hidden:hidden + k].reshape(-1).index_select(0, order)
    out.zero_()
    return self.grouped_forward(rows[:, :hidden], torch.floor_divide(order, k), alpha, counts, weights, scratch, out)

# g [R, H]; back [R, H + k] is overwritten with (dx, dalpha).
def received_backward(self, rows: Tensor, g: Tensor, k: int, table: Tensor, slots: int, weights: List[Tensor], grads: List[Tensor], scratch: List[Tensor], back: Tensor) -> int:
    hidden = g.size(1)
    order, counts = self.group_received(rows, k, table, slots)
    alpha = rows[:, hidden:hidden + k].reshape(-1).index_select(0, order)
    dalpha = torch.empty_like(alpha)
    back.zero_()
    self.grouped_backward(rows[:, :hidden], g, torch.floor_divide(order, k), alpha, counts, weights, grads, scratch, back[:, :hidden], dalpha)
    spread = torch.zeros([rows.size(0) * k], dtype=rows.dtype, device=rows.device).index_copy_(0, order, dalpha)
    back[:, hidden:].copy_(spread.view(-1, k))
    return 0

# (dx, dalpha) of rows [R, H + k] into those of their tokens.
def add_gradients(self, rows: Tensor, tokens: Tensor, dx: Tensor, dcombine: Tensor) -> int:
    hidden = dx.size(1)
    dx.index_add_(0, tokens, rows[:, :hidden])
    dcombine.index_add_(0, tokens, rows[:, hidden:])
    return 0
