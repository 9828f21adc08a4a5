/**
 * Expert caches on paper: routing traces and a cache size come in, loads per token under each
 * eviction policy go out.
 *
 * <p>Only ids live here, no weights: whoever serves a model asks the same {@link
 * org.djlmoe.cache.ExpertCache} what to load and what to drop, and moves the tensors itself.
 */
package org.djlmoe.cache;
