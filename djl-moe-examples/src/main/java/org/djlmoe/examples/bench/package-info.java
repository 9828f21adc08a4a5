/**
 * Benchmarks with every case in a Java virtual machine of its own: cases and their settings come
 * in, times, peaks and errors against a reference go out. Dispatch over ranks is measured in the
 * calling machine, with ranks as threads.
 */
package org.djlmoe.examples.bench;
