package org.djlmoe.training;

import java.util.ArrayList;
import java.util.List;
import org.djlmoe.expert.MergedAdapters;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.moe.MoeBlock;

/** A model whose adapters are merged for a while; closing undoes it, see {@link MergedAdapters}. */
public final class MergedModel implements AutoCloseable {

    private final List<MergedAdapters> layers = new ArrayList<>();

    MergedModel(MoeDecoder decoder) {
        boolean done = false;
        try {
            for (MoeBlock layer : decoder.moeBlocks()) {
                layers.add(layer.experts().mergeAdaptersForNow());
            }
            done = true;
        } finally {
            if (!done) {
                close();
            }
        }
    }

    /**
     * Returns how many weights the merge changed.
     *
     * @return elements
     */
    public long changed() {
        return layers.stream().mapToLong(MergedAdapters::changed).sum();
    }

    /** Puts weights and adapters back. */
    @Override
    public void close() {
        layers.forEach(MergedAdapters::close);
    }
}
