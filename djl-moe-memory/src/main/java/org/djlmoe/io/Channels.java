package org.djlmoe.io;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.FileSystemException;
import java.nio.file.Files;
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

    /**
     * Appends all of {@code source}.
     *
     * @param file what the channel will be called when it is complete, for the error
     */
    static void writeFully(Path file, FileChannel channel, ByteBuffer source) throws IOException {
        try {
            while (source.hasRemaining()) {
                channel.write(source);
            }
        } catch (IOException e) {
            throw failure(file, e);
        }
    }

    /**
     * Has what was written survive a loss of power. Some systems find only now that a disk is full.
     */
    static void force(Path file, FileChannel channel) throws IOException {
        try {
            channel.force(true);
        } catch (IOException e) {
            throw failure(file, e);
        }
    }

    /** A stream whose errors name the file; closing it leaves the channel open. */
    static OutputStream newOutputStream(Path file, FileChannel channel) {
        return new OutputStream() {
            @Override
            public void write(int value) throws IOException {
                write(new byte[] {(byte) value}, 0, 1);
            }

            @Override
            public void write(byte[] bytes, int from, int count) throws IOException {
                writeFully(file, channel, ByteBuffer.wrap(bytes, from, count));
            }
        };
    }

    /** Says which file could not be written, which the operating system's reason does not. */
    static IOException failure(Path file, IOException reason) {
        String text = reason.getMessage();
        if (reason instanceof FileSystemException named && named.getReason() != null) {
            text = named.getReason();
        }
        return new IOException(
                "Cannot write %s: %s. Its disk has %s left: free some, or write to another folder"
                        .formatted(file, text, room(file)),
                reason);
    }

    private static String room(Path file) {
        try {
            Path folder = file.toAbsolutePath().getParent();
            return Files.getFileStore(folder).getUsableSpace() + " bytes";
        } catch (IOException e) {
            return "too little room";
        }
    }
}
