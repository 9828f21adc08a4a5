/**
 * Text for the examples: the European Parliament's transcripts with their languages, and a
 * tokenizer of bytes. Class-path resources come in, documents and token ids go out.
 */
package org.djlmoe.examples.text;
