package org.djlmoe.io;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Path;

/** Whole transfers over a channel that may transfer less at a time. */
final class Channels {

    private Channels() {}

    /** Fills {@code target} from {@code position} on. */
    static void readFully(Path file, FileChannel channel, long position, ByteBuffer target)
            throws IOException {
        long at = position;
        while (target.hasRemaining()) {
            int count = channel.read(target, at);
            if (count < 0) {
                throw new SafetensorsException(
                        file, "ends at byte " + at + " though more was announced (truncated?)");
            }
            at += count;
        }
    }

    /** Appends all of {@code source}. */
    static void writeFully(FileChannel channel, ByteBuffer source) throws IOException {
        while (source.hasRemaining()) {
            channel.write(source);
        }
    }
}
