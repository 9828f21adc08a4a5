/**
 * Safetensors files as streams: paths and tensor names come in, pieces of tensors widened to F32
 * (or raw bytes) go out, and the other way round for writing.
 *
 * <p>Nothing in here needs a native engine, and no file is ever held in memory or mapped.
 */
package org.djlmoe.io;
