package org.djlmoe.examples.serving;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.serving.ExpertStore;
import org.djlmoe.serving.FileExpertStore;
import org.djlmoe.serving.HostExpertStore;
import org.djlmoe.serving.IncrementalDecoder;
import org.djlmoe.serving.OffloadedExperts;
import org.djlmoe.serving.ResidentExperts;
import org.djlmoe.serving.ServedExperts;

/** A checkpoint folder, opened for serving. Used by one thread; closing frees all of it. */
public final class ServedCheckpoint implements AutoCloseable {

    private final ExpertStore store;
    private final Path temporary;
    private final IncrementalDecoder decoder;

    private ServedCheckpoint(ExpertStore store, Path temporary, IncrementalDecoder decoder) {
        this.store = store;
        this.temporary = temporary;
        this.decoder = decoder;
    }

    /**
     * Opens a folder.
     *
     * @param folder holds {@code config.json} and safetensors
     * @param prior ranks the experts; null for the router alone
     * @param settings where the experts are
     * @return the model, with an empty expert cache
     * @throws IOException if a file is missing or broken, or the store cannot be written
     * @throws IllegalArgumentException if the cache is too small for one token, or the static
     *     policy has no set
     */
    public static ServedCheckpoint open(Path folder, ExpertPrior prior, ServingSettings settings)
            throws IOException {
        MoeConfig config = MoeConfig.fromJson(folder.resolve(HfCheckpoint.CONFIG_FILE));
        Path temporary = null;
        ExpertStore store = null;
        ServedExperts experts = null;
        try {
            if (settings.tier() == ServingSettings.Tier.HOST) {
                store = HostExpertStore.load(folder, config, settings.packing());
            } else {
                Path file = settings.store();
                if (file == null) {
                    temporary = Files.createTempFile("djl-moe-experts-", ".safetensors");
                    Files.delete(temporary);
                    file = temporary;
                }
                FileExpertStore.Reads reads =
                        settings.cold() ? FileExpertStore.Reads.COLD : FileExpertStore.Reads.CACHED;
                store = FileExpertStore.openOrPack(folder, config, settings.packing(), file, reads);
                if (temporary != null && unlinked(temporary)) {
                    temporary = null;
                }
            }
            experts =
                    settings.expertCache() == 0
                            ? ResidentExperts.load(store)
                            : offloaded(config, store, prior, settings);
            IncrementalDecoder decoder = IncrementalDecoder.load(folder, experts);
            if (prior != null) {
                prior.apply(decoder.decoder());
            }
            return new ServedCheckpoint(store, temporary, decoder);
        } catch (IOException | RuntimeException e) {
            if (experts != null) {
                experts.close();
            }
            close(store, temporary);
            throw e;
        }
    }

    /** An open file needs no name on most systems, and then is gone however the process ends. */
    private static boolean unlinked(Path file) {
        try {
            Files.delete(file);
            return true;
        } catch (IOException e) {
            return false;
        }
    }

    private static ServedExperts offloaded(
            MoeConfig config, ExpertStore store, ExpertPrior prior, ServingSettings settings) {
        OffloadedExperts.Builder builder =
                OffloadedExperts.builder()
                        .setStore(store)
                        .setCapacity(settings.expertCache())
                        .setTopK(config.topK())
                        .optPolicy(settings.policy())
                        .optAdmission(settings.admission())
                        .optPrefetch(settings.prefetch())
                        .optSeed(settings.seed());
        if (settings.policy() == EvictionPolicy.Type.STATIC && prior != null) {
            builder.optStaticSet(prior.mask());
        }
        return builder.build();
    }

    /**
     * Returns the model.
     *
     * @return the decoder
     */
    public IncrementalDecoder decoder() {
        return decoder;
    }

    @Override
    public void close() throws IOException {
        decoder.close();
        close(store, temporary);
    }

    private static void close(ExpertStore store, Path temporary) {
        try {
            if (store != null) {
                store.close();
            }
            if (temporary != null) {
                Files.deleteIfExists(temporary);
            }
        } catch (IOException e) {
            throw new UncheckedIOException("Cannot close the expert store", e);
        }
    }
}
