/** What tests of several packages need to run: programs come in, what they print goes out. */
package org.djlmoe.testing;
