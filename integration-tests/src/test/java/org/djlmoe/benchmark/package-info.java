/** JMH benchmarks: settings come in as parameters, times go out. Each says how to run it. */
package org.djlmoe.benchmark;
