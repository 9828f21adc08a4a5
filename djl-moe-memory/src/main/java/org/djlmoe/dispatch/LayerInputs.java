package org.djlmoe.dispatch;

import ai.djl.ndarray.NDArray;
import java.util.List;

/** What a pass of a layer reads, in forward and in backward. */
record LayerInputs(
        DispatchRoute route, NDArray x, NDArray ids, NDArray combine, List<NDArray> weights) {}
